"""Which runs a sweep has, and how they are cut: settings x seeds -> groups of one program, chunks of bounded memory.

A *setting* is a config and one value of every hyperparameter. Settings of equal config form a *group*: one program.
A group's runs, setting by setting and seed by seed, are cut into *chunks*, all of one shape, of which the program takes
one at a time; each device takes its share of a chunk in *blocks* of runs side by side.

What a run's numbers depend on: its setting, its seed, and, in their last bits, on the machine, its number of devices,
and how many runs lie side by side in a block. So a plan fixes the blocks, and how the runs are cut into chunks, which
process takes a chunk, and in which order, changes nothing, bitwise.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from purejaxppo import kinds
from purejaxppo.config import check_size
from purejaxppo.devices import layout, mesh_of

if TYPE_CHECKING:
    from purejaxppo.kinds import AnyConfig, AnyHParams

# On a CPU the working set of a block should stay in the cache; measured in benchmarks/NOTES.md.
CPU_WIDTH = 4
# Unless the caller says how many runs: blocks of a device in a chunk, and environment steps of a device in a chunk.
# Enough to be fast, few enough to save every few minutes.
BLOCKS = 32
CHUNK_STEPS = 16_000_000


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
    """Settings of equal config, which one program trains.

    Attributes:
      config: of all of them.
      settings: their indices in the plan.
      shape: of the program.
      chunk_size: runs of a chunk; at most `shape.num_runs`.
    """

    config: "AnyConfig"
    settings: tuple[int, ...]
    shape: Shape
    chunk_size: int


class Chunk(NamedTuple):
    """Some runs of one group: everything that their numbers depend on. Travels to other processes."""

    config: "AnyConfig"
    hparams: "AnyHParams"  # NumPy leaves [n] float32
    seed: int  # of the sweep
    seeds: np.ndarray  # [n] int, which of the sweep's seeds each run has
    shape: Shape

    @property
    def num_steps(self) -> int:
        """Environment steps of all runs; on token sequences, responses."""
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

    configs: tuple["AnyConfig", ...]
    hparams: "AnyHParams"
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
    config: "AnyConfig | Sequence[AnyConfig]",
    hparams: "AnyHParams",
    num_seeds: int,
    seed: int = 0,
    chunk_size: int | None = None,
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
    members: dict[AnyConfig, list[int]] = {}
    for index, each in enumerate(configs):
        members.setdefault(each, []).append(index)
    for each, indices in members.items():
        kinds.of(each).check(each, _read(jax.tree.map(lambda leaf, i=indices: leaf[i], hparams), each, tuple(members)))
    groups = tuple(
        Group(each, tuple(indices), *_lay_out(each, len(indices) * num_seeds, chunk_size))
        for each, indices in members.items()
    )
    return Plan(configs, hparams, int(num_seeds), int(seed), groups)


def _settings(
    config: "AnyConfig | Sequence[AnyConfig]", hparams: "AnyHParams"
) -> tuple[tuple["AnyConfig", ...], "AnyHParams"]:
    """One config a setting and leaves [num_settings], whichever of them was one for all."""
    leaves = [np.asarray(leaf, np.float32) for leaf in hparams]
    shapes = {leaf.shape for leaf in leaves} - {()}
    if isinstance(config, Sequence):
        shapes.add((len(config),))
    if len(shapes) > 1 or any(len(shape) != 1 or not shape[0] for shape in shapes):
        raise ValueError(f"hparams: leaves of shapes {sorted(shapes)}: must be scalars or of one length")
    shape = shapes.pop() if shapes else (1,)
    configs = tuple(config) if isinstance(config, Sequence) else (config,) * shape[0]
    _check_kinds(configs, hparams)
    return configs, kinds.of(hparams).hparams(*(np.broadcast_to(leaf, shape) for leaf in leaves))


def _check_kinds(configs: Sequence["AnyConfig"], hparams: "AnyHParams") -> None:
    """Refuses runs on environments and on token sequences in one sweep."""
    kind = kinds.of(hparams)
    for config in configs:
        if kinds.of(config) is not kind:
            raise ValueError(
                f"config: {type(config).__name__} with {type(hparams).__name__}: must be {kind.config.__name__}"
            )


def _read(hparams: "AnyHParams", config: "AnyConfig", configs: tuple["AnyConfig", ...]) -> "AnyHParams":
    """`hparams` with those at their defaults that this config does not read but another of the sweep does."""
    kind = kinds.of(config)
    unread = {
        name: kind.hparams._field_defaults[name]
        for name, (_, reads) in kind.needs.items()
        if not reads(config) and any(map(reads, configs))
    }
    return hparams._replace(**unread)


def _lay_out(config: "AnyConfig", num_runs: int, chunk_size: int | None) -> tuple[Shape, int]:
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
