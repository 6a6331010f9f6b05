"""Many runs: settings x seeds, as one program over all local devices."""

import concurrent.futures
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from purejaxppo.config import Config, HParams, check_hparams, check_names, check_size
from purejaxppo.devices import RUNS, layout, mesh_of, shard
from purejaxppo.train import init, run
from purejaxppo.types import Metrics, TrainState

# On a CPU the working set of a block should stay in the cache; measured in benchmarks/NOTES.md.
CPU_WIDTH = 8

Progress = Callable[[int, Metrics], None]


@dataclasses.dataclass(frozen=True)
class SweepResult:
    """What a sweep leaves.

    Attributes:
      config: of all runs.
      hparams: the settings, leaves [num_settings].
      metrics: NumPy leaves [num_settings, num_seeds, num_updates].
      state: final states, leaves [num_settings, num_seeds, ...].
      compile_seconds: tracing and compiling.
      run_seconds: everything else: what the steps took.
    """

    config: Config
    hparams: HParams
    metrics: Metrics
    state: TrainState
    compile_seconds: float
    run_seconds: float

    @property
    def steps_per_second(self) -> float:
        """Environment steps per second of all runs together, without compilation."""
        settings, seeds, updates = self.metrics.learning_rate.shape
        return settings * seeds * updates * self.config.batch_size / self.run_seconds


def grid(hparams: HParams, **axes: Sequence[float]) -> HParams:
    """Every combination of the given values, the last axis varying fastest.

    Args:
      hparams: the values of all other fields.
      **axes: field name = list of values.

    Returns:
      HParams with float32 leaves [num_settings], for `jax.vmap` or `sweep`.

    Raises:
      ValueError: for an unknown field (with the nearest one) or an empty list.
    """
    check_names("hparams", axes, HParams._fields)
    for name, values in axes.items():
        if np.ndim(values) != 1 or not len(values):
            raise ValueError(f"hparams.{name} = {values!r}: must be a list of at least one value")
    settings = [
        hparams._replace(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())
    ]
    return HParams(*(jnp.asarray(values, jnp.float32) for values in zip(*settings, strict=True)))


def sweep(
    config: Config, hparams: HParams, num_seeds: int, seed: int = 0, progress: Progress | None = None
) -> SweepResult:
    """Trains every setting with every seed, all at once, sharded over the local devices.

    Seed j of every setting draws the same random numbers, so settings can be compared seed by seed. A run's numbers
    depend on nothing but its setting, `seed` and j.

    Args:
      config: static settings of all runs.
      hparams: settings: scalars for one, or leaves [num_settings] as `grid` makes them.
      num_seeds: runs of each setting.
      seed: of the whole sweep.
      progress: called on the host about forty times in all with (updates done, metrics [num_runs, ...] of the latest).

    Returns:
      Metrics and final states of all runs.

    Raises:
      ValueError: for an invalid setting, before anything is compiled.
    """
    check_size("num_seeds", num_seeds)
    check_size("seed", seed, lowest=0)
    check_hparams(config, hparams)
    hparams = _settings(hparams)
    num_settings = hparams.learning_rate.shape[0]
    num_runs = num_settings * num_seeds

    started = time.perf_counter()
    mesh = mesh_of(num_runs)
    width, padded = layout(num_runs, mesh, CPU_WIDTH)
    runs = np.minimum(np.arange(padded), num_runs - 1)  # the last, repeated, fills up
    keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(runs % num_seeds)
    inputs = (jax.tree.map(lambda x: x[runs // num_seeds], hparams), keys)
    run_hparams, keys = jax.device_put(inputs, NamedSharding(mesh, RUNS))

    lengths = _segment_lengths(config.num_updates)
    compile_started = time.perf_counter()
    start, segments = _compile(mesh, width, config, run_hparams, keys, set(lengths))
    compile_seconds = time.perf_counter() - compile_started

    state, parts = start(run_hparams, keys), []
    for done, length in zip(itertools.accumulate(lengths), lengths, strict=True):
        state, metrics = segments[length](run_hparams, state)
        parts.append(jax.tree.map(lambda x: np.asarray(x)[:num_runs], metrics))
        if progress is not None:
            progress(done, parts[-1])

    def settings_by_seeds(x: Any) -> Any:
        return x[:num_runs].reshape(num_settings, num_seeds, *x.shape[1:])

    metrics = jax.tree.map(lambda *leaves: settings_by_seeds(np.concatenate(leaves, axis=1)), *parts)
    state = jax.jit(lambda state: jax.tree.map(settings_by_seeds, state))(state)  # one program, not two a leaf
    run_seconds = time.perf_counter() - started - compile_seconds
    return SweepResult(config, hparams, metrics, state, compile_seconds, run_seconds)


def _settings(hparams: HParams) -> HParams:
    """Leaves [num_settings], whichever of them were scalars."""
    leaves = [np.asarray(leaf, np.float32) for leaf in hparams]
    shapes = {leaf.shape for leaf in leaves} - {()}
    if len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
        raise ValueError(f"hparams: leaves of shapes {sorted(shapes)}: must be scalars or of one length")
    shape = shapes.pop() if shapes else (1,)
    return HParams(*(np.broadcast_to(leaf, shape) for leaf in leaves))


def _compile(
    mesh: Mesh, width: int, config: Config, hparams: HParams, keys: jax.Array, lengths: set[int]
) -> tuple[Any, dict[int, Any]]:
    """`init`, and `run` for each number of updates, compiled side by side."""
    start = shard(mesh, width, functools.partial(init, config), num_by_run=2)
    state = jax.eval_shape(start, hparams, keys)
    programs = [start.lower(hparams, keys)]
    for length in lengths:
        segment = functools.partial(run, config, num_updates=length)
        programs.append(shard(mesh, width, segment, num_by_run=2, donate=(1,)).lower(hparams, state))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = list(pool.map(lambda program: program.compile(), programs))
    return compiled[0], dict(zip(lengths, compiled[1:], strict=True))


def _segment_lengths(num_updates: int, num_segments: int = 40) -> list[int]:
    """Lengths of about `num_segments` pieces, all equal if a near divisor exists: another length compiles again."""
    ideal = max(1, num_updates // num_segments)
    length = min(
        range(-(-ideal // 2), 2 * ideal + 1), key=lambda length: (num_updates % length > 0, abs(length - ideal))
    )
    whole, rest = divmod(num_updates, length)
    return [length] * whole + [rest] * (rest > 0)
