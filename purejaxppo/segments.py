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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from purejaxppo import kinds
from purejaxppo.devices import RUNS, shard
from purejaxppo.plan import Chunk, Shape
from purejaxppo.train import evaluate
from purejaxppo.types import Episodes, TrainState

if TYPE_CHECKING:
    from purejaxppo.kinds import AnyConfig, AnyState

NOT_A_SEED = 2**32 - 1  # keys of evaluations descend from it, those of the runs from their indices
SEGMENT_SECONDS = 1.0  # at most, if an update is shorter; the host's part takes about a hundredth of it
MAX_CAPACITY = 1000  # updates of a segment
MAX_WAITING = 2**20  # updates of all runs of a segment, whose metrics wait on the devices
TYPES = {"num_episodes": np.int32, "num_epochs": np.int32, "all_finite": np.bool_}  # other metrics are float32
BUFFERS = ("argument_size_in_bytes", "temp_size_in_bytes", "output_size_in_bytes")


class Programs(NamedTuple):
    """The compiled programs of a chunk.

    Of many small arrays each costs a program kernels: they take hyperparameters as one array, [num_runs, fields]
    float32, and return the metrics of a segment as one, [num_runs, capacity, fields] int32, of the bits of each. Keys
    are their data, [..., 2] uint32: JAX calls programs without typed ones faster.
    """

    start: Any  # (hparams, seeds [num_runs, 2]) -> state, leaves [num_runs, ...]
    segment: Any  # (num_updates, hparams, state) -> (state, metrics); the state is donated
    evaluate: Any  # (keys, state) -> Episodes [num_runs, E]; None if it was not asked for
    num_bytes: int  # that a device needs


def capacity(num_updates: int, num_runs: int) -> int:
    """Updates of the longest segment of `num_runs` runs side by side: all of a short run."""
    return min(num_updates, MAX_CAPACITY, max(1, MAX_WAITING // num_runs))


def next_length(seconds_per_update: float | None, most: int) -> int:
    """Updates of the next segment: what lasts `SEGMENT_SECONDS`; one, if nobody knows yet how long an update takes."""
    if seconds_per_update is None:
        return 1
    return max(1, min(most, int(SEGMENT_SECONDS / max(seconds_per_update, 1e-9))))


def compile_programs(config: "AnyConfig", shape: Shape, num_episodes: int = 0) -> Programs:
    """Compiles what the training of chunks of this shape needs, each program while the next is traced.

    Args:
      config: of the runs.
      shape: of the chunk.
      num_episodes: of an evaluation, E; 0 for no evaluations, which only environments have.
    """
    kind = kinds.of(config)
    on_devices = functools.partial(shard, shape.mesh, shape.width, num_by_run=2)
    hparams = jax.ShapeDtypeStruct((shape.num_runs, len(kind.hparams._fields)), np.float32)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        seeds = jax.ShapeDtypeStruct((shape.num_runs, 2), np.uint32)
        start = on_devices(functools.partial(_start, config)).lower(hparams, seeds)
        compiling = [pool.submit(start.compile)]
        state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), start.out_info)
        most = capacity(config.num_updates, shape.num_runs)
        segment = on_devices(functools.partial(_segment, config, most), num_shared=1, donate=(2,))
        lowered = segment.lower(jax.ShapeDtypeStruct((), np.int32), hparams, state)
        compiling.append(pool.submit(lowered.compile))
        if num_episodes:
            keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), shape.num_runs))
            evaluation = on_devices(functools.partial(_evaluate, config, num_episodes, True))
            compiling.append(pool.submit(evaluation.lower(keys, state).compile))
        compiled = [program.result() for program in compiling]
    memory = compiled[1].memory_analysis()
    num_bytes = sum(getattr(memory, name) for name in BUFFERS) - memory.alias_size_in_bytes
    return Programs(compiled[0], compiled[1], compiled[2] if num_episodes else None, int(num_bytes))


def begin(chunk: Chunk, programs: Programs) -> tuple[jax.Array, Any]:
    """Hyperparameters [num_runs, fields] and states of the runs before their first update, on the devices."""
    seeds = np.stack([np.full_like(chunk.seeds, chunk.seed % 2**32), chunk.seeds], axis=-1).astype(np.uint32)
    hparams, seeds = jax.device_put(_pad(chunk, (_stacked(chunk), seeds)), _by_run(chunk))
    return hparams, programs.start(hparams, seeds)


def put(chunk: Chunk, state: "AnyState") -> tuple[jax.Array, Any]:
    """Hyperparameters and states of runs that `take` brought to the host, back on the devices."""
    return jax.device_put(_pad(chunk, (_stacked(chunk), state)), _by_run(chunk))


def take(chunk: Chunk, state: Any) -> Any:
    """The states of the runs without the padding, NumPy leaves [n, ...]; of keys, their data."""
    return jax.tree.map(lambda leaf: np.array(leaf)[: len(chunk.seeds)], state)


def state_shapes(chunk: Chunk) -> Any:
    """Shape and type of what `take` gives."""
    kind = kinds.of(chunk.config)
    one = jax.eval_shape(lambda key: bare(kind.init(chunk.config, kind.hparams(), key)), jax.random.key(0))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((len(chunk.seeds), *leaf.shape), leaf.dtype), one)


def advance(
    chunk: Chunk, programs: Programs, hparams: jax.Array, state: "AnyState", num_updates: int
) -> tuple[Any, Any]:
    """One segment; `state` is gone afterwards.

    Returns:
      The state after it, and metrics with NumPy leaves [n, num_updates].
    """
    state, words = programs.segment(_length(num_updates, chunk.shape.mesh), hparams, state)
    return state, _metrics(chunk, np.asarray(words)[: len(chunk.seeds), :num_updates])


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


def _start(config: "AnyConfig", hparams: jax.Array, seeds: jax.Array) -> "AnyState":
    """A run before its first update, from the sweep's seed and the run's own, [2] uint32."""
    kind = kinds.of(config)
    key = jax.random.fold_in(jax.random.key(seeds[0]), seeds[1])
    return bare(kind.init(config, kind.hparams(*hparams), key))


def _segment(
    config: "AnyConfig", most: int, num_updates: jax.Array, hparams: jax.Array, state: "AnyState"
) -> tuple["AnyState", jax.Array]:
    """`run` of a number of updates, () int32, that is known only when it runs; metrics [most, fields], zeros behind."""
    kind = kinds.of(config)

    def step(index: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        state, words = carry
        state, metrics = kind.update(config, kind.hparams(*hparams), state)
        return state, words.at[index].set(_words(metrics))

    blank = jnp.zeros((most, len(kind.metrics._fields)), jnp.int32)
    state, words = jax.lax.fori_loop(0, num_updates, step, (keyed(state), blank))
    return bare(state), words


def keyed(state: Any) -> Any:
    """`bare` states with typed keys again."""
    return state._replace(key=jax.random.wrap_key_data(state.key))


def bare(state: Any) -> Any:
    """States with the data of their keys, as the programs take and return them."""
    return state._replace(key=jax.random.key_data(state.key))


@functools.lru_cache(maxsize=1024)
def _length(num_updates: int, mesh: Mesh) -> jax.Array:
    """On every device. Kept: to bring it there again takes milliseconds, as Python does after seconds of XLA."""
    return jax.device_put(np.int32(num_updates), NamedSharding(mesh, PartitionSpec()))


def _in_order(metrics: Any) -> list[str]:
    """The fields of metrics as `_words` has them: what is float32 first, so that its bits are taken at once."""
    return sorted(metrics._fields, key=TYPES.__contains__)


def _words(metrics: Any) -> jax.Array:
    """The bits of one update's metrics, [fields] int32."""
    reals = [leaf for name, leaf in metrics._asdict().items() if name not in TYPES]
    others = [leaf.astype(jnp.int32) for name, leaf in metrics._asdict().items() if name in TYPES]
    return jnp.concatenate([jax.lax.bitcast_convert_type(jnp.stack(reals), jnp.int32), jnp.stack(others)])


def _metrics(chunk: Chunk, words: np.ndarray) -> Any:
    """The metrics whose bits are [n, updates, fields], leaves [n, updates]."""
    kind = kinds.of(chunk.config)
    columns = zip(_in_order(kind.metrics), np.ascontiguousarray(np.moveaxis(words, -1, 0)), strict=True)
    types = {name: TYPES.get(name, np.float32) for name in kind.metrics._fields}
    leaves = {name: x.view(np.float32) if types[name] is np.float32 else x.astype(types[name]) for name, x in columns}
    return kind.metrics(**leaves)


def _evaluate(config: Any, num_episodes: int, deterministic: bool, key: jax.Array, state: TrainState) -> Episodes:
    return evaluate(config, keyed(state), key, num_episodes, deterministic)


def _stacked(chunk: Chunk) -> np.ndarray:
    """Hyperparameters, [n, fields] float32."""
    return np.stack([np.asarray(leaf, np.float32) for leaf in chunk.hparams], axis=-1)


def _pad(chunk: Chunk, tree: Any) -> Any:
    """Leaves [n, ...] as [num_runs, ...]: the last run, repeated, fills up."""
    runs = np.minimum(np.arange(chunk.shape.num_runs), len(chunk.seeds) - 1)
    return jax.tree.map(lambda leaf: leaf[runs], tree)


def _by_run(chunk: Chunk) -> NamedSharding:
    return NamedSharding(chunk.shape.mesh, RUNS)
