"""Sweeps as a person starts them: in bounded memory, resumed from a directory, on this machine or on many."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from purejaxppo import kinds, results, segments
from purejaxppo.host import chunks, cluster, memory
from purejaxppo.host.programs import compile_group
from purejaxppo.plan import Plan, make_plan
from purejaxppo.settings import varying
from purejaxppo.sweep import Progress, blank, place, train_chunk

if TYPE_CHECKING:
    import pandas

    from purejaxppo.kinds import AnyConfig, AnyHParams, AnyMetrics

EXECUTORS = ("local", "ray")


class Done(NamedTuple):
    """A finished chunk."""

    chunk: int  # its index in the plan
    metrics: "AnyMetrics"  # NumPy leaves [n, num_updates]
    state: Any = None  # leaves [n, ...]
    compile_seconds: float = 0.0  # of this process
    num_steps: int = 0  # steps that have not been reported


class Report(NamedTuple):
    """How far a sweep is."""

    num_runs_done: int  # of all runs, those of finished chunks
    num_steps: int  # environment steps, or responses, since the last report
    metrics: Any  # of them, leaves [runs, updates]; None if they were taken elsewhere


@dataclasses.dataclass(frozen=True, eq=False)
class SweepResult:
    """What a sweep leaves.

    Attributes:
      plan: settings, seeds, and how the runs lay on the devices.
      metrics: NumPy leaves [num_settings, num_seeds, num_updates]; a setting of fewer updates than another has NaN
        behind its last (0 where a number counts).
      state: final states, leaves [num_settings, num_seeds, ...], if they were asked for.
      compile_seconds: tracing and compiling.
      run_seconds: everything else: what the steps took; 0 if the result was loaded.
    """

    plan: Plan
    metrics: Any
    state: Any = None
    compile_seconds: float = 0.0
    run_seconds: float = 0.0

    @property
    def configs(self) -> tuple[Any, ...]:
        """Static settings, one a setting."""
        return self.plan.configs

    @property
    def hparams(self) -> Any:
        """Traced settings, leaves [num_settings]."""
        return self.plan.hparams

    @property
    def num_steps(self) -> int:
        """Environment steps of all runs together; on token sequences, responses, or pairs."""
        return sum(config.num_updates * config.batch_size for config in self.configs) * self.plan.num_seeds

    @property
    def steps_per_second(self) -> float:
        """`num_steps` a second of all runs together, without compilation."""
        return self.num_steps / self.run_seconds if self.run_seconds else float("nan")

    @property
    def axes(self) -> dict[str, tuple[Any, ...]]:
        """The fields that differ between settings: name -> its value in each."""
        return varying(self.configs, self.hparams)

    def summary(self, threshold: float | None = None) -> list[dict[str, Any]]:
        """The numbers to quote of each setting, see `results.summary`; on token sequences `results.token_summary`."""
        if self._on_tokens:
            return results.token_summary(self.metrics, self._num_updates)
        return results.summary(self.metrics, self._num_updates, self._batch_sizes, threshold)

    def best(self) -> int:
        """The setting of the highest interquartile mean of the final return; of settings of one environment.

        On token sequences, of the final objective: of settings of one task and coefficient.
        """
        return results.best(self.summary(), "objective" if self._on_tokens else "final_return")

    def to_dataframe(self, curves: bool = False) -> "pandas.DataFrame":
        """A row for each run: the setting's index, the fields that differ between settings, and how the run ended.

        Args:
          curves: a row for each update of each run instead, with all metrics.
        """
        import pandas

        settings, seeds = len(self.configs), self.plan.num_seeds
        setting, seed = np.divmod(np.arange(settings * seeds), seeds)
        index: dict[str, Any] = {"setting": setting, "seed": seed}
        index |= {name: [column[i] for i in setting] for name, column in self.axes.items()}
        if not curves:
            measures = results.TOKEN_MEASURES if self._on_tokens else results.MEASURES
            for name, measure in (measures | {"finite": lambda metrics: metrics.all_finite.all(axis=-1)}).items():
                index[name] = results.per_setting(measure, self.metrics, self._num_updates).reshape(-1)
            return pandas.DataFrame(index)
        runs = pandas.DataFrame(index)
        lengths = np.array(self._num_updates)[runs["setting"]]
        rows = runs.loc[runs.index.repeat(lengths)].reset_index(drop=True)
        rows["update"] = np.concatenate([np.arange(length) for length in lengths])
        kept = np.arange(self.metrics.entropy.shape[-1]) < lengths[:, None]
        leaves = {name: leaf.reshape(settings * seeds, -1)[kept] for name, leaf in self.metrics._asdict().items()}
        return rows.assign(**leaves)

    @property
    def _on_tokens(self) -> bool:
        return kinds.of(self.hparams) is not kinds.ENVIRONMENTS

    @property
    def _num_updates(self) -> list[int]:
        return [config.num_updates for config in self.configs]

    @property
    def _batch_sizes(self) -> list[int]:
        return [config.batch_size for config in self.configs]

    def save(self, directory: Path | str) -> None:
        """Writes the directory that `load` reads, as an interrupted sweep of it would have been finished."""
        plan = chunks.adopt(Path(directory), self.plan, None) or self.plan
        flat = [leaf.reshape(plan.num_runs, -1) for leaf in self.metrics]
        with contextlib.closing(chunks.Store(Path(directory), plan)) as store:
            for index, (group, runs) in enumerate(plan.places):
                store.write(index, self.metrics._make(leaf[runs, : group.config.num_updates] for leaf in flat))

    @classmethod
    def load(cls, directory: Path | str) -> "SweepResult":
        """The result of a finished sweep.

        Raises:
          ValueError: for a directory that holds none, or not all of it.
        """
        plan = chunks.find(Path(directory))
        if plan is None:
            raise ValueError(f"{directory}: holds no sweep")
        metrics, missing = blank(plan), 0
        for index in range(len(plan.places)):
            part = chunks.read(Path(directory), plan, index)
            if part is None:
                missing += 1
            else:
                place(plan, metrics, index, part)
        if missing:
            raise ValueError(
                f"{directory}: {missing} of {len(plan.places)} chunks are missing or damaged; "
                "the command that began this sweep finishes it"
            )
        return cls(plan, metrics)


def sweep(
    config: "AnyConfig | Sequence[AnyConfig]",
    hparams: "AnyHParams",
    num_seeds: int,
    seed: int = 0,
    *,
    chunk_size: int | None = None,
    directory: Path | str | None = None,
    executor: str = "local",
    ray_address: str | None = None,
    keep_state: bool = False,
    progress: Callable[[Report], None] = lambda report: None,
) -> SweepResult:
    """Trains every setting with every seed, sharded over the local devices, in bounded memory.

    Seed j of every setting draws the same random numbers, so settings can be compared seed by seed. A run's numbers
    depend on nothing but its setting, `seed` and j: chunk size, executor and interruptions change no bit of them.

    Args:
      config: static settings of all runs, `Config` or `tokens.TokenConfig`, or a sequence of them, one a setting (see
        `settings`); equal ones share a program.
      hparams: traced settings: scalars for one, or leaves [num_settings] as `grid` makes them.
      num_seeds: runs of each setting.
      seed: of the whole sweep.
      chunk_size: runs that are trained at once; by default what is fast and fits in memory.
      directory: where each finished chunk is kept; a second call with the same settings goes on from there.
      executor: "local", or "ray" for a cluster.
      ray_address: of the cluster; None starts Ray on this machine.
      keep_state: whether to keep the final states too (local, without a directory, and of one config only).
      progress: called on the host at the start, about every second, and at the end of each chunk.

    Returns:
      Metrics of all runs.

    Raises:
      ValueError: for an invalid setting, memory that does not suffice, a directory of another sweep, or a cluster that
        cannot be reached, before anything runs.
    """
    if executor not in EXECUTORS:
        raise ValueError(f"executor = {executor!r}: allowed: {', '.join(map(repr, EXECUTORS))}")
    if keep_state and (directory is not None or executor != "local" or isinstance(config, Sequence)):
        raise ValueError("keep_state = True: must be of one config, without directory, and on the local executor")
    started = time.perf_counter()
    plan = make_plan(config, hparams, num_seeds, seed, chunk_size)
    memory.check_results(plan)
    plan = _settle(plan, chunk_size, directory, executor)
    metrics, compile_seconds = blank(plan), 0.0
    states: list[Any] = []
    with contextlib.ExitStack() as stack:
        ray = stack.enter_context(cluster.connected(ray_address)) if executor == "ray" else None
        store = None
        if directory is not None:
            store = stack.enter_context(contextlib.closing(chunks.Store(Path(directory), plan)))
        todo = _place_kept(plan, metrics, store)
        runs_done = plan.num_runs - sum(len(plan.places[index][1]) for index in todo)
        progress(Report(runs_done, 0, None))

        def moved(steps: int, latest: "AnyMetrics") -> None:
            progress(Report(runs_done, steps, latest))

        for done in _train(plan, todo, ray, moved, keep_state):
            place(plan, metrics, done.chunk, done.metrics)
            if store is not None:
                store.write(done.chunk, done.metrics)
            if keep_state:
                states.append(done.state)
            compile_seconds += done.compile_seconds
            runs_done += len(done.metrics.all_finite)
            progress(Report(runs_done, done.num_steps, None))
    state = _together(plan, states) if keep_state else None
    return SweepResult(plan, metrics, state, compile_seconds, time.perf_counter() - started - compile_seconds)


def _place_kept(plan: Plan, metrics: "AnyMetrics", store: chunks.Store | None) -> list[int]:
    """Places the chunks that are kept, and returns those that are not."""
    todo = []
    for index in range(len(plan.places)):
        kept = None if store is None else store.read(index)
        if kept is None:
            todo.append(index)
        else:
            place(plan, metrics, index, kept)
    return todo


def _train(plan: Plan, todo: Sequence[int], ray: Any, moved: Progress, keep_state: bool) -> Iterator[Done]:
    """Trains chunks here, or elsewhere if there is Ray."""
    if ray is None:
        yield from (_here(plan, index, moved, keep_state) for index in todo)
    else:
        for index, metrics in cluster.on_ray(ray, plan, todo):
            yield Done(index, metrics, num_steps=plan.chunk(index).num_steps)


def _settle(plan: Plan, chunk_size: int | None, directory: Path | str | None, executor: str) -> Plan:
    """The plan as the directory has it, or for a new one with chunks that fit in memory."""
    found = None if directory is None else chunks.adopt(Path(directory), plan, chunk_size)
    if executor != "local":
        return found or plan
    if found is None:
        return memory.fit_plan(plan, chunk_size)
    needed, there = chunks.num_devices(found), len(jax.local_devices())
    if needed > there:
        raise ValueError(
            f"{directory}: was begun on {needed} devices, of which there are {there} here; "
            f"on a CPU use_all_cores(at_least={needed}) makes as many"
        )
    return found


def _here(plan: Plan, index: int, moved: Progress, keep_state: bool) -> Done:
    """Trains a chunk in this process. Unless they are kept, its states are gone before the next chunk needs memory."""
    chunk = plan.chunk(index)
    started = time.perf_counter()
    programs = compile_group(chunk.config, chunk.shape)
    compile_seconds = time.perf_counter() - started
    state, metrics = train_chunk(programs, chunk, moved)
    return Done(index, metrics, state if keep_state else None, compile_seconds)


def _together(plan: Plan, states: Sequence[Any]) -> Any:
    """The padded states of all chunks as leaves [num_settings, num_seeds, ...]."""
    sizes = [len(runs) for _, runs in plan.places]

    def merge(*leaves: Any) -> Any:
        whole = jnp.concatenate([leaf[:size] for leaf, size in zip(leaves, sizes, strict=True)])
        return whole.reshape(len(plan.configs), plan.num_seeds, *whole.shape[1:])

    return jax.jit(lambda *states: segments.keyed(jax.tree.map(merge, *states)))(*states)  # not a program a leaf
