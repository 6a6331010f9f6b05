"""Training the chunks of a plan with the programs of its groups, segment by segment."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from purejaxppo import kinds, segments
from purejaxppo.plan import Chunk, Group, Plan, Shape
from purejaxppo.segments import Programs

if TYPE_CHECKING:
    from purejaxppo.kinds import AnyConfig, AnyMetrics

Progress = Callable[[int, Any], None]
CompileGroup = Callable[[Any, Shape], Programs]


def fit(plan: Plan, num_bytes: int, compile_group: CompileGroup) -> Plan:
    """The plan with chunks, and if need be blocks, halved until no program needs more than `num_bytes` of a device.

    Args:
      compile_group: `segments.compile_programs`, or what keeps its results.
    """
    return dataclasses.replace(plan, groups=tuple(_fit_group(group, num_bytes, compile_group) for group in plan.groups))


def train_chunk(programs: Programs, chunk: Chunk, progress: Progress | None = None) -> tuple[Any, Any]:
    """All updates of a chunk.

    Args:
      programs: of its group.
      chunk: the runs.
      progress: called on the host about every second with (steps since the last call, metrics of them).

    Returns:
      The padded final state, and metrics with NumPy leaves [n, num_updates].
    """
    num_updates = chunk.config.num_updates
    hparams, state = segments.begin(chunk, programs)
    most, seconds, done, parts = segments.capacity(num_updates, chunk.shape.num_runs), None, 0, []
    while done < num_updates:
        length = segments.next_length(seconds, min(most, num_updates - done))
        started = time.perf_counter()
        state, metrics = segments.advance(chunk, programs, hparams, state, length)
        seconds = (time.perf_counter() - started) / length
        done += length
        parts.append(metrics)
        if progress is not None:
            progress(metrics.learning_rate.size * chunk.config.batch_size, metrics)
    return state, jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *parts)


def measure(programs: Programs, chunk: Chunk, num_steps: int = 2_000_000) -> float:
    """Trains a piece of a chunk to see how long it takes.

    Args:
      programs: of its group.
      chunk: whose first updates are run.
      num_steps: environment steps of the piece, at most; at least one update.

    Returns:
      Seconds an update of the whole chunk.
    """
    updates = num_steps // (chunk.config.batch_size * chunk.shape.num_runs)
    length = max(1, min(segments.capacity(chunk.config.num_updates, chunk.shape.num_runs), updates))
    hparams, state = segments.begin(chunk, programs)
    started = time.perf_counter()
    segments.advance(chunk, programs, hparams, state, length)
    return (time.perf_counter() - started) / length


def blank(plan: Plan) -> Any:
    """Metrics of a sweep of which nothing is done, NumPy leaves [num_settings, num_seeds, largest num_updates].

    NaN, 0 where a number counts, and true. Where a setting has fewer updates than another, that stays behind its last.
    """
    fills = {"f": np.nan, "i": 0, "b": True}
    return jax.tree.map(lambda leaf: np.full(leaf.shape, fills[leaf.dtype.kind], leaf.dtype), _metrics_shapes(plan))


def num_bytes_of_metrics(plan: Plan) -> int:
    """Main memory that `blank` takes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in _metrics_shapes(plan))


def place(plan: Plan, metrics: "AnyMetrics", index: int, chunk_metrics: "AnyMetrics") -> None:
    """Writes the metrics of a chunk, leaves [n, num_updates], to their place in those of the sweep."""
    _, runs = plan.places[index]
    for whole, leaf in zip(metrics, chunk_metrics, strict=True):
        whole.reshape(plan.num_runs, -1)[runs, : leaf.shape[1]] = leaf


def _fit_group(group: Group, num_bytes: int, compile_group: CompileGroup) -> Group:
    shape, size = group.shape, group.chunk_size
    if 10 * _rough_num_bytes(group.config, shape) < num_bytes:
        return group  # not worth compiling now to know it exactly
    while compile_group(group.config, shape).num_bytes > num_bytes and (shape.num_blocks > 2 or shape.width > 1):
        if shape.num_blocks > 2:
            shape = shape._replace(num_blocks=-(-shape.num_blocks // 2))
        else:
            shape = shape._replace(width=-(-shape.width // 2), num_blocks=2)
        size = min(size, shape.num_runs)
    return dataclasses.replace(group, shape=shape, chunk_size=size)


def _rough_num_bytes(config: "AnyConfig", shape: Shape) -> float:
    """Two copies of the states of a device's runs, and what a block of them works in; within a factor of four."""
    state = _state_shapes(config)
    states = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    return shape.width * (2 * shape.num_blocks * states + kinds.of(config).num_bytes(config, state))


@functools.lru_cache(maxsize=64)
def _state_shapes(config: "AnyConfig") -> Any:
    """Shape and type of each leaf of a run's state.

    Raises:
      ValueError: for an environment that does not exist, or that the config does not suit.
    """
    kind = kinds.of(config)
    return jax.eval_shape(functools.partial(kind.init, config), kind.hparams(), jax.random.key(0))


def _metrics_shapes(plan: Plan) -> Any:
    """Shape and type of each leaf of a sweep's metrics, known without tracing a program."""
    shape = (len(plan.configs), plan.num_seeds, max(group.config.num_updates for group in plan.groups))
    kind = kinds.of(plan.hparams)
    types = (segments.TYPES.get(name, np.float32) for name in kind.metrics._fields)
    return kind.metrics._make(jax.ShapeDtypeStruct(shape, each) for each in types)
