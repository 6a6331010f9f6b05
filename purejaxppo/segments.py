"""The runs of one chunk in segments: pieces of training between which the host looks, writes and evaluates.

A segment is told when it starts how many updates it has, so one program runs segments of every length, and where a run
is cut changes no bit of it.
"""

import concurrent.futures
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from purejaxppo import kinds
from purejaxppo.devices import RUNS, shard
from purejaxppo.plan import Chunk, Shape
from purejaxppo.train import evaluate
from purejaxppo.types import Episodes, TrainState

if TYPE_CHECKING:
    from purejaxppo.kinds import AnyConfig, AnyHParams, AnyMetrics, AnyState

NOT_A_SEED = 2**32 - 1  # keys of evaluations descend from it, those of the runs from their indices
NUM_SEGMENTS = 40  # of a short run
MAX_CAPACITY = 1000  # updates of a segment, whose metrics wait on the devices
BUFFERS = ("argument_size_in_bytes", "temp_size_in_bytes", "output_size_in_bytes")


class Programs(NamedTuple):
    """The compiled programs of a chunk."""

    start: Any  # (hparams, keys) -> state, leaves [num_runs, ...]
    segment: Any  # (num_updates, hparams, state) -> (state, metrics [num_runs, capacity]); the state is donated
    evaluate: Any  # (keys, state) -> Episodes [num_runs, E]; None if it was not asked for
    num_bytes: int  # that a device needs


def capacity(num_updates: int) -> int:
    """Updates of the longest segment of a run: a fortieth of a short one."""
    return min(MAX_CAPACITY, -(-num_updates // NUM_SEGMENTS))


def compile_programs(config: "AnyConfig", shape: Shape, num_episodes: int = 0) -> Programs:
    """Compiles what the training of chunks of this shape needs, side by side.

    Args:
      config: of the runs.
      shape: of the chunk.
      num_episodes: of an evaluation, E; 0 for no evaluations, which only environments have.
    """
    kind = kinds.of(config)
    on_devices = functools.partial(shard, shape.mesh, shape.width, num_by_run=2)
    scalars = jax.ShapeDtypeStruct((shape.num_runs,), np.float32)
    hparams = kind.hparams(*(scalars for _ in kind.hparams._fields))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), shape.num_runs))
    start = on_devices(functools.partial(kind.init, config)).lower(hparams, keys)
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), start.out_info)
    segment = on_devices(functools.partial(_segment, config), num_shared=1, donate=(2,))
    lowered = [start, segment.lower(jax.ShapeDtypeStruct((), np.int32), hparams, state)]
    if num_episodes:
        evaluation = functools.partial(_evaluate, config, num_episodes, True)
        lowered.append(on_devices(evaluation).lower(keys, state))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = list(pool.map(lambda program: program.compile(), lowered))
    memory = compiled[1].memory_analysis()
    num_bytes = sum(getattr(memory, name) for name in BUFFERS) - memory.alias_size_in_bytes
    return Programs(compiled[0], compiled[1], compiled[2] if num_episodes else None, int(num_bytes))


def begin(chunk: Chunk, programs: Programs) -> tuple[Any, Any]:
    """Hyperparameters and states of the runs before their first update, on the devices."""
    hparams, keys = jax.device_put(_inputs(chunk), _by_run(chunk))
    return hparams, programs.start(hparams, keys)


def put(chunk: Chunk, state: "AnyState") -> tuple[Any, Any]:
    """Hyperparameters and states of runs that `take` brought to the host, back on the devices."""
    keyed = state._replace(key=jax.random.wrap_key_data(jnp.asarray(state.key)))
    return jax.device_put(_pad(chunk, (chunk.hparams, keyed)), _by_run(chunk))


def take(chunk: Chunk, state: Any) -> Any:
    """The states of the runs without the padding, NumPy leaves [n, ...]; of keys, their data."""
    data = state._replace(key=jax.random.key_data(state.key))
    return jax.tree.map(lambda leaf: np.array(leaf)[: len(chunk.seeds)], data)


def state_shapes(chunk: Chunk) -> Any:
    """Shape and type of what `take` gives."""
    kind = kinds.of(chunk.config)
    one = jax.eval_shape(functools.partial(kind.init, chunk.config), kind.hparams(), jax.random.key(0))
    one = one._replace(key=jax.eval_shape(jax.random.key_data, one.key))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((len(chunk.seeds), *leaf.shape), leaf.dtype), one)


def advance(
    chunk: Chunk, programs: Programs, hparams: "AnyHParams", state: "AnyState", num_updates: int
) -> tuple[Any, Any]:
    """One segment; `state` is gone afterwards.

    Returns:
      The state after it, and metrics with NumPy leaves [n, num_updates].
    """
    length = jax.device_put(np.int32(num_updates), NamedSharding(chunk.shape.mesh, PartitionSpec()))
    state, metrics = programs.segment(length, hparams, state)
    return state, jax.tree.map(lambda leaf: np.asarray(leaf)[: len(chunk.seeds), :num_updates], metrics)


def evaluate_runs(chunk: Chunk, programs: Programs, state: TrainState, update_index: int) -> Episodes:
    """Episodes of every run's most likely actions, NumPy leaves [n, E]; nothing of the training is touched.

    Args:
      update_index: chooses the episodes, so that a resumed run is evaluated on those of an uninterrupted one.
    """
    keys = jax.device_put(_pad(chunk, evaluation_keys(chunk.seed, chunk.seeds, update_index)), _by_run(chunk))
    episodes = programs.evaluate(keys, state)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[: len(chunk.seeds)], episodes)


def evaluate_all(chunk: Chunk, state: TrainState, seed: int, num_episodes: int, deterministic: bool) -> Episodes:
    """Episodes of finished runs, all at once.

    Args:
      chunk: the runs.
      state: of them, as `take` gives it.
      seed: chooses the episodes.
      num_episodes: of each run, E.
      deterministic: take the most likely action instead of sampling.

    Returns:
      NumPy leaves [n, E].
    """
    _, placed = put(chunk, state)
    keys = jax.device_put(_pad(chunk, evaluation_keys(seed, chunk.seeds, 0)), _by_run(chunk))
    function = functools.partial(_evaluate, chunk.config, num_episodes, deterministic)
    episodes = shard(chunk.shape.mesh, chunk.shape.width, function, num_by_run=2)(keys, placed)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[: len(chunk.seeds)], episodes)


def evaluation_keys(seed: int, seeds: np.ndarray, index: int) -> jax.Array:
    """Keys [n] that no run trains with, the `index`-th of each run."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), NOT_A_SEED), index)
    return jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.asarray(seeds, jnp.uint32))


def _segment(
    config: "AnyConfig", num_updates: jax.Array, hparams: "AnyHParams", state: "AnyState"
) -> tuple["AnyState", "AnyMetrics"]:
    """`run` of a number of updates, () int32, that is known only when it runs; metrics [capacity], zeros behind."""
    most = capacity(config.num_updates)
    # Traced once for the shapes and the loop.
    one_update = jax.jit(functools.partial(kinds.of(config).update, config), inline=True)
    one = jax.eval_shape(one_update, hparams, state)[1]
    blank = jax.tree.map(lambda leaf: jnp.zeros((most, *leaf.shape), leaf.dtype), one)

    def step(index: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        state, metrics = carry
        state, latest = one_update(hparams, state)
        return state, jax.tree.map(lambda whole, leaf: whole.at[index].set(leaf), metrics, latest)

    return jax.lax.fori_loop(0, num_updates, step, (state, blank))


def _evaluate(config: Any, num_episodes: int, deterministic: bool, key: jax.Array, state: TrainState) -> Episodes:
    return evaluate(config, state, key, num_episodes, deterministic)


def _inputs(chunk: Chunk) -> Any:
    """Hyperparameters and keys of the runs, padded, [num_runs]; the keys are those of `sweep`."""
    key = jax.random.key(chunk.seed)
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.asarray(chunk.seeds, jnp.uint32))
    return _pad(chunk, (chunk.hparams, keys))


def _pad(chunk: Chunk, tree: Any) -> Any:
    """Leaves [n, ...] as [num_runs, ...]: the last run, repeated, fills up."""
    runs = np.minimum(np.arange(chunk.shape.num_runs), len(chunk.seeds) - 1)
    return jax.tree.map(lambda leaf: leaf[runs], tree)


def _by_run(chunk: Chunk) -> NamedSharding:
    return NamedSharding(chunk.shape.mesh, RUNS)
