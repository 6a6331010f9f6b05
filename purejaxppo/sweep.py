"""Training the chunks of a plan: which device each run goes to, one program a group, segment by segment."""

import concurrent.futures
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from purejaxppo.config import Config, HParams
from purejaxppo.devices import RUNS, shard
from purejaxppo.plan import Chunk, Group, Plan, Shape
from purejaxppo.train import init, run, train
from purejaxppo.types import Metrics, TrainState

Progress = Callable[[int, Metrics], None]


def fit(plan: Plan, num_bytes: int) -> Plan:
    """The plan with chunks, and if need be blocks, halved until no program needs more than `num_bytes` of a device."""
    return dataclasses.replace(plan, groups=tuple(_fit_group(group, num_bytes) for group in plan.groups))


class Program(NamedTuple):
    """The compiled program of a group."""

    start: Any  # (hparams, keys) -> state, leaves [num_runs, ...]
    segments: dict[int, Any]  # number of updates -> (hparams, state) -> (state, metrics); the state is donated
    num_bytes: int  # that a device needs


@functools.lru_cache(maxsize=8)
def compile_program(config: Config, shape: Shape) -> Program:
    """`init`, and `run` for each length of segment, compiled side by side."""
    scalars = jax.ShapeDtypeStruct((shape.num_runs,), np.float32)
    hparams, keys = HParams(*(scalars for _ in HParams._fields)), jax.eval_shape(lambda: _keys(0, [0] * shape.num_runs))
    start = shard(shape.mesh, shape.width, functools.partial(init, config), num_by_run=2)
    state = jax.eval_shape(start, hparams, keys)
    lengths = sorted(set(segment_lengths(config.num_updates)))
    programs = [start.lower(hparams, keys)]
    for length in lengths:
        segment = functools.partial(run, config, num_updates=length)
        programs.append(shard(shape.mesh, shape.width, segment, num_by_run=2, donate=(1,)).lower(hparams, state))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first, *others = pool.map(lambda program: program.compile(), programs)
    return Program(first, dict(zip(lengths, others, strict=True)), max(map(_num_bytes, others)))


def begin(chunk: Chunk) -> tuple[HParams, TrainState]:
    """The padded hyperparameters of a chunk and its runs before their first update, leaves [shape.num_runs, ...]."""
    runs = np.minimum(np.arange(chunk.shape.num_runs), len(chunk.seeds) - 1)  # the last, repeated, fills up
    inputs = (jax.tree.map(lambda leaf: leaf[runs], chunk.hparams), _keys(chunk.seed, chunk.seeds[runs]))
    hparams, keys = jax.device_put(inputs, NamedSharding(chunk.shape.mesh, RUNS))
    return hparams, compile_program(chunk.config, chunk.shape).start(hparams, keys)


def advance(chunk: Chunk, hparams: HParams, state: TrainState, done: int = 0) -> Iterator[tuple[TrainState, Metrics]]:
    """The segments of a chunk from update `done` on, which must be where one ended: (state, metrics of the segment).

    A state is donated to the next segment: read it before asking for another. Metrics are NumPy, without the padding.
    """
    program = compile_program(chunk.config, chunk.shape)
    for end, length in _segments(chunk.config.num_updates):
        if end > done:
            state, metrics = program.segments[length](hparams, state)
            yield state, jax.tree.map(lambda leaf: np.asarray(leaf)[: len(chunk.seeds)], metrics)


def train_chunk(chunk: Chunk, progress: Progress | None = None) -> tuple[TrainState, Metrics]:
    """All updates of a chunk.

    Args:
      chunk: the runs.
      progress: called on the host about forty times with (environment steps since the last call, metrics of them).

    Returns:
      The padded final state, and metrics with NumPy leaves [n, num_updates].
    """
    hparams, state = begin(chunk)
    parts = []
    for state, metrics in advance(chunk, hparams, state):  # noqa: B007, B020 (the last one is the final one)
        parts.append(metrics)
        if progress is not None:
            progress(metrics.learning_rate.size * chunk.config.batch_size, metrics)
    return state, jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *parts)


def measure(chunk: Chunk, num_steps: int = 2_000_000) -> tuple[int, float, float]:
    """Trains a piece of a chunk to see what it takes.

    Args:
      chunk: whose first updates are run.
      num_steps: environment steps of the piece, at most; at least one update.

    Returns:
      (bytes that a device needs, seconds to compile the chunk's program, seconds an update of the whole chunk).
    """
    started = time.perf_counter()
    program = compile_program(chunk.config, chunk.shape)
    compile_seconds = time.perf_counter() - started
    length = max(1, min(chunk.config.num_updates, num_steps // (chunk.config.batch_size * chunk.shape.num_runs)))
    hparams, state = begin(chunk)
    segment = functools.partial(run, chunk.config, num_updates=length)
    piece = shard(chunk.shape.mesh, chunk.shape.width, segment, num_by_run=2).lower(hparams, state).compile()
    started = time.perf_counter()
    jax.block_until_ready(piece(hparams, state))
    return program.num_bytes, compile_seconds, (time.perf_counter() - started) / length


def blank(plan: Plan) -> Metrics:
    """Metrics of a sweep of which nothing is done, NumPy leaves [num_settings, num_seeds, largest num_updates].

    NaN, 0 where a number counts, and true. Where a setting has fewer updates than another, that stays behind its last.
    """
    fills = {"f": np.nan, "i": 0, "b": True}
    return jax.tree.map(lambda leaf: np.full(leaf.shape, fills[leaf.dtype.kind], leaf.dtype), _metrics_shapes(plan))


def num_bytes_of_metrics(plan: Plan) -> int:
    """Main memory that `blank` takes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in _metrics_shapes(plan))


def place(plan: Plan, metrics: Metrics, index: int, chunk_metrics: Metrics) -> None:
    """Writes the metrics of a chunk, leaves [n, num_updates], to their place in those of the sweep."""
    _, runs = plan.places[index]
    for whole, leaf in zip(metrics, chunk_metrics, strict=True):
        whole.reshape(plan.num_runs, -1)[runs, : leaf.shape[1]] = leaf


def segment_lengths(num_updates: int, num_segments: int = 40) -> list[int]:
    """Lengths of about `num_segments` pieces, all equal if a near divisor exists: another length compiles again."""
    ideal = max(1, num_updates // num_segments)
    length = min(
        range(-(-ideal // 2), 2 * ideal + 1), key=lambda length: (num_updates % length > 0, abs(length - ideal))
    )
    whole, rest = divmod(num_updates, length)
    return [length] * whole + [rest] * (rest > 0)


def _segments(num_updates: int) -> Iterator[tuple[int, int]]:
    lengths = segment_lengths(num_updates)
    return zip(itertools.accumulate(lengths), lengths, strict=True)


def _keys(seed: int, seeds: Any) -> jax.Array:
    """The keys of the runs, [n]."""
    return jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(jnp.asarray(seeds, jnp.uint32))


def _num_bytes(compiled: Any) -> int:
    """What a device must hold while a program runs."""
    memory = compiled.memory_analysis()
    sizes = (memory.argument_size_in_bytes, memory.temp_size_in_bytes, memory.output_size_in_bytes)
    return int(sum(sizes) - memory.alias_size_in_bytes)


def _fit_group(group: Group, num_bytes: int) -> Group:
    shape, size = group.shape, group.chunk_size
    if 10 * _rough_num_bytes(group.config, shape) < num_bytes:
        return group  # not worth compiling now to know it exactly
    while compile_program(group.config, shape).num_bytes > num_bytes and (shape.num_blocks > 2 or shape.width > 1):
        if shape.num_blocks > 2:
            shape = shape._replace(num_blocks=-(-shape.num_blocks // 2))
        else:
            shape = shape._replace(width=-(-shape.width // 2), num_blocks=2)
        size = min(size, shape.num_runs)
    return dataclasses.replace(group, shape=shape, chunk_size=size)


def _rough_num_bytes(config: Config, shape: Shape) -> float:
    """Two copies of the states of a device's runs, and a block's rollouts and activations; within a factor of four."""
    state = _state_shapes(config)
    rollout = config.num_steps * state.obs.size * state.obs.dtype.itemsize
    activations = 4 * config.batch_size * sum(config.hidden_sizes)
    states = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    return shape.width * (2 * shape.num_blocks * states + 4 * rollout + 2 * activations)


@functools.lru_cache(maxsize=64)
def _state_shapes(config: Config) -> TrainState:
    """Shape and type of each leaf of a run's state.

    Raises:
      ValueError: for an environment that does not exist, or that the config does not suit.
    """
    return jax.eval_shape(functools.partial(init, config), HParams(), jax.random.key(0))


def _metrics_shapes(plan: Plan) -> Metrics:
    """Shape and type of each leaf of a sweep's metrics."""
    one = jax.eval_shape(functools.partial(train, plan.configs[0]), HParams(), jax.random.key(0))[1]
    shape = (len(plan.configs), plan.num_seeds, max(group.config.num_updates for group in plan.groups))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(shape, leaf.dtype), one)
