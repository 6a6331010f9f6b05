"""Many runs: settings x seeds, in groups of one program and chunks of bounded memory, over all local devices.

A *setting* is a `Config` and one value of every hyperparameter. Settings of equal `Config` form a *group*: one program.
A group's runs, setting by setting and seed by seed, are cut into *chunks*, all of one shape, of which the program takes
one at a time; each device takes its share of a chunk in *blocks* of runs side by side.

What a run's numbers depend on: its setting, its seed, and, in their last bits, on the machine and on how many runs lie
side by side in a block. So a plan fixes the blocks, and how the runs are cut into chunks, which process takes a chunk,
and in which order, changes nothing, bitwise.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from purejaxppo.config import NEEDS, Config, HParams, check_hparams, check_size
from purejaxppo.devices import RUNS, layout, mesh_of, shard
from purejaxppo.train import init, run, train
from purejaxppo.types import Metrics, TrainState

# On a CPU the working set of a block should stay in the cache; measured in benchmarks/NOTES.md.
CPU_WIDTH = 8
# Unless the caller says how many runs: blocks of a device in a chunk, and environment steps of a device in a chunk.
# Enough to be fast, few enough to save every few minutes.
BLOCKS = 8
CHUNK_STEPS = 16_000_000

Progress = Callable[[int, Metrics], None]


class Shape(NamedTuple):
    """How the runs of a chunk lie on the devices: hashable, and all of it that a program depends on."""

    num_devices: int
    width: int  # runs side by side in a block
    num_blocks: int  # of each device, one after another

    @property
    def num_runs(self) -> int:
        """Runs that a program takes; those beyond the chunk's own are padding."""
        return self.num_devices * self.width * self.num_blocks

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return mesh_of(self.num_devices)


@dataclasses.dataclass(frozen=True)
class Group:
    """Settings of equal `Config`, which one program trains.

    Attributes:
      config: of all of them.
      settings: their indices in the plan.
      shape: of the program.
      chunk_size: runs of a chunk; at most `shape.num_runs`.
    """

    config: Config
    settings: tuple[int, ...]
    shape: Shape
    chunk_size: int


class Chunk(NamedTuple):
    """Some runs of one group: everything that their numbers depend on. Travels to other processes."""

    config: Config
    hparams: HParams  # NumPy leaves [n] float32
    seed: int  # of the sweep
    seeds: np.ndarray  # [n] int, which of the sweep's seeds each run has
    shape: Shape

    @property
    def num_steps(self) -> int:
        """Environment steps of all runs."""
        return len(self.seeds) * self.config.num_updates * self.config.batch_size


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """All runs of a sweep and how they are cut into chunks.

    Attributes:
      configs: one a setting.
      hparams: NumPy leaves [num_settings] float32.
      num_seeds: runs of each setting.
      seed: of the whole sweep; run j of a setting draws from fold_in(key(seed), j).
      groups: in order of their first settings.
    """

    configs: tuple[Config, ...]
    hparams: HParams
    num_seeds: int
    seed: int
    groups: tuple[Group, ...]

    @property
    def num_runs(self) -> int:
        """Settings times seeds."""
        return len(self.configs) * self.num_seeds

    @functools.cached_property
    def places(self) -> tuple[tuple[Group, np.ndarray], ...]:
        """The group of each chunk, and its runs [n] as setting * num_seeds + seed."""
        places = []
        for group in self.groups:
            starts = np.asarray(group.settings)[:, None] * self.num_seeds
            runs = (starts + np.arange(self.num_seeds)).reshape(-1)
            cuts = range(group.chunk_size, len(runs), group.chunk_size)
            places += [(group, piece) for piece in np.split(runs, cuts)]
        return tuple(places)

    def chunk(self, index: int) -> Chunk:
        """One of the `len(places)` chunks."""
        group, runs = self.places[index]
        hparams = jax.tree.map(lambda leaf: leaf[runs // self.num_seeds], self.hparams)
        return Chunk(group.config, hparams, self.seed, runs % self.num_seeds, group.shape)


def make_plan(
    config: Config | Sequence[Config], hparams: HParams, num_seeds: int, seed: int = 0, chunk_size: int | None = None
) -> Plan:
    """Checks the settings and lays the runs out.

    Args:
      config: static settings of all runs, or a sequence of them, one a setting.
      hparams: scalars, or leaves [num_settings].
      num_seeds: runs of each setting.
      seed: of the whole sweep.
      chunk_size: runs that are in memory at once; by default a few blocks of every device.

    Raises:
      ValueError: for an invalid setting, whichever it is, before anything is compiled.
    """
    check_size("num_seeds", num_seeds)
    check_size("seed", seed, lowest=0)
    if chunk_size is not None:
        check_size("chunk_size", chunk_size)
    configs, hparams = _settings(config, hparams)
    members: dict[Config, list[int]] = {}
    for index, each in enumerate(configs):
        members.setdefault(each, []).append(index)
    for each, indices in members.items():
        check_hparams(each, _read(jax.tree.map(lambda leaf, i=indices: leaf[i], hparams), each, tuple(members)))
        _state_shapes(each)  # the environment knows the rest
    groups = tuple(
        Group(each, tuple(indices), *_lay_out(each, len(indices) * num_seeds, chunk_size))
        for each, indices in members.items()
    )
    return Plan(configs, hparams, int(num_seeds), int(seed), groups)


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


def _settings(config: Config | Sequence[Config], hparams: HParams) -> tuple[tuple[Config, ...], HParams]:
    """One config a setting and leaves [num_settings], whichever of them was one for all."""
    leaves = [np.asarray(leaf, np.float32) for leaf in hparams]
    shapes = {leaf.shape for leaf in leaves} - {()}
    if not isinstance(config, Config):
        shapes.add((len(config),))
    if len(shapes) > 1 or any(len(shape) != 1 or not shape[0] for shape in shapes):
        raise ValueError(f"hparams: leaves of shapes {sorted(shapes)}: must be scalars or of one length")
    shape = shapes.pop() if shapes else (1,)
    configs = (config,) * shape[0] if isinstance(config, Config) else tuple(config)
    return configs, HParams(*(np.broadcast_to(leaf, shape) for leaf in leaves))


def _read(hparams: HParams, config: Config, configs: tuple[Config, ...]) -> HParams:
    """`hparams` with those at their defaults that this config does not read but another of the sweep does."""
    unread = {
        name: HParams._field_defaults[name]
        for name, (_, reads) in NEEDS.items()
        if not reads(config) and any(map(reads, configs))
    }
    return hparams._replace(**unread)


def _lay_out(config: Config, num_runs: int, chunk_size: int | None) -> tuple[Shape, int]:
    """The shape of a group's program, and the runs of a chunk."""
    mesh = mesh_of(num_runs)
    width, padded = layout(num_runs, mesh, CPU_WIDTH)
    row = width * mesh.size  # one block of every device
    rows = padded // row
    if chunk_size is None:
        steps = width * config.num_updates * config.batch_size
        num_chunks = -(-rows // max(1, min(BLOCKS, CHUNK_STEPS // steps)))
        num_blocks = -(-rows // num_chunks)
        chunk_size = min(num_runs, num_blocks * row)
    else:
        chunk_size = min(num_runs, chunk_size)
        num_blocks = -(-chunk_size // row)
    # XLA drops the loop over a single block, which can change the last bits: chunks have one all together, or none.
    return Shape(mesh.size, width, max(num_blocks, min(rows, 2))), chunk_size


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
