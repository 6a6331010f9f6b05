"""`purejaxppo rlhf CONFIG.toml`: reference, preference pairs, reward models and RL, from one command."""

import dataclasses
import functools
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from purejaxppo.host import resuming, rlhf_experiment, rlhf_report, rlhf_stages, rlhf_store, signals
from purejaxppo.host.rlhf_experiment import RlhfExperiment
from purejaxppo.host.rlhf_stages import Stages, own_of, prepare
from purejaxppo.host.rlhf_store import Checkpoint
from purejaxppo.tokens.segments import CAPACITY, Runs
from purejaxppo.tokens.types import TokenMetrics

SEGMENT_SECONDS = 2.0
CHECKPOINT_SECONDS = 30.0
EVALUATION_KEY = 2**32 - 5  # no run's index
SPEED, SCORE = "{task.fields[speed]}", "{task.fields[score]}"


def run_rlhf(experiment: RlhfExperiment, out: Path) -> int:
    """All of an experiment, or what is left of it.

    Args:
      experiment: the settings.
      out: directory; one in which the same experiment was begun is gone on with.

    Returns:
      The exit code: 0; 1 where a run did not stay finite; 130 or 143 after a signal.

    Raises:
      ValueError: for an invalid setting, missing names, or a directory of another experiment.
    """
    console = Console(stderr=True)
    if experiment.config.task == "names":
        rlhf_stages.load_names()  # where they are missing, nothing is begun
    rlhf_store.begin(out, experiment)
    with resuming.held(out), signals.noted() as came:
        try:
            return _run(experiment, out, console, came)
        except KeyboardInterrupt as stop:
            console.print("stopped; the same command goes on from the last checkpoint", markup=False)
            return 128 + (came.number or (stop.args[0] if stop.args else signal.SIGINT))


def _run(experiment: RlhfExperiment, out: Path, console: Console, came: signals.Noted) -> int:
    stages = rlhf_store.read_stages(out, experiment)
    if stages is None:
        with console.status("") as status:
            stages = prepare(experiment, lambda text: status.update(text))
        rlhf_store.write_stages(out, stages)
    started = time.perf_counter()
    runs = Runs(experiment.config, stages.shared, own_of(experiment, stages))
    state = runs.start(_keys(experiment, runs.num_runs, None))
    found = rlhf_store.read_checkpoint(out, runs.take(state))
    if found is not None:
        state = runs.put(found.state)
    came.patient = True
    begun = found or Checkpoint(runs.take(state), {}, 0.0)
    done, state, compile_seconds = _train(experiment, runs, state, begun, out, console, came, started)
    came.patient = False
    if came.number:
        raise KeyboardInterrupt(came.number)
    return _finish(experiment, stages, runs, state, done, compile_seconds, out)


def _train(
    experiment: RlhfExperiment,
    runs: Runs,
    state: Any,
    done: Checkpoint,
    out: Path,
    console: Console,
    came: signals.Noted,
    started: float,
) -> tuple[Checkpoint, Any, float]:
    """The updates that are left, in segments of a few seconds; checkpoints on the way and at the end."""
    num_updates, length, compile_seconds = experiment.config.num_updates, 1, 0.0
    parts = [done.metrics] if done.metrics else []
    index = done.update_index
    seconds, saved = done.run_seconds, time.perf_counter()
    with _bar(console, experiment, runs.num_runs, index) as moved:
        while index < num_updates and not came.number:
            length = min(length, num_updates - index, CAPACITY)
            before = time.perf_counter()
            state, metrics = runs.advance(state, length)
            spent = time.perf_counter() - before
            if compile_seconds == 0.0:
                compile_seconds = time.perf_counter() - started
            else:
                seconds += spent
            index += length
            parts.append(metrics._asdict())
            moved(length, metrics, spent)
            length = max(1, int(length * min(8.0, SEGMENT_SECONDS / max(spent, 1e-6))))
            if time.perf_counter() - saved > CHECKPOINT_SECONDS or index == num_updates or came.number:
                rlhf_store.write_checkpoint(out, _checkpoint(runs, state, parts, seconds))
                saved = time.perf_counter()
    return _checkpoint(runs, state, parts, seconds), state, compile_seconds


def _checkpoint(runs: Runs, state: Any, parts: list[dict[str, np.ndarray]], seconds: float) -> Checkpoint:
    names = TokenMetrics._fields
    metrics = {name: np.concatenate([part[name] for part in parts], axis=1) for name in names} if parts else {}
    return Checkpoint(runs.take(state), metrics, seconds)


def _finish(
    experiment: RlhfExperiment,
    stages: Stages,
    runs: Runs,
    state: Any,
    done: Checkpoint,
    compile_seconds: float,
    out: Path,
) -> int:
    """Measures the policies, writes the results, and says the most important."""
    console = Console()
    keys = _keys(experiment, runs.num_runs, EVALUATION_KEY)
    quality = runs.evaluate(state, keys, experiment.eval_responses)
    summary = rlhf_report.write(out, experiment, stages, done, quality, compile_seconds)
    console.print(rlhf_report.table(summary))
    console.print(f"{out}/: frontier.png, samples.md, summary.json, metrics.npz, config.toml", markup=False)
    if summary["diverged"]:
        broken = ", ".join(f"{run} (from update {update} on)" for run, update in summary["diverged"].items())
        Console(stderr=True).print(f"purejaxppo: not finite: run {broken}; everything is saved in {out}", markup=False)
        return 1
    return 0


def _keys(experiment: RlhfExperiment, num_runs: int, domain: int | None) -> jax.Array:
    """A key for each run, the same for all runs of one seed; of another domain for what is not training."""
    key = jax.random.key(experiment.seed)
    if domain is not None:
        key = jax.random.fold_in(key, domain)
    seeds = np.arange(num_runs, dtype=np.uint32) % experiment.num_seeds
    return jax.vmap(functools.partial(jax.random.fold_in, key))(seeds)


@contextmanager
def _bar(console: Console, experiment: RlhfExperiment, num_runs: int, done: int) -> Iterator[Any]:
    """A progress bar; yields what is to be called after each segment."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn(SPEED))
    with Progress(*columns, TimeRemainingColumn(), TextColumn(SCORE), console=console) as progress:
        name = f"{num_runs} runs of {experiment.config.algorithm}"
        task = progress.add_task(
            f"{name}: compiling", total=experiment.config.num_updates, completed=done, speed="", score=""
        )
        first = True

        def moved(length: int, metrics: TokenMetrics, seconds: float) -> None:
            nonlocal first
            speed = "" if first else f"{length * num_runs / seconds:,.0f} updates/s"
            score = f"score {np.mean(metrics.score):.3g}, KL {np.mean(metrics.ref_kl):.3g}"
            if np.isnan(metrics.score).all():
                score = f"accuracy {np.nanmean(metrics.accuracy):.3g}"
            progress.update(task, description=name, advance=length, speed=speed, score=score)
            first = False

        yield moved


def read(path: Path, **changes: Any) -> RlhfExperiment:
    """The experiment of a file, with the flags of a command line in place of what it says."""
    experiment = rlhf_experiment.read(path)
    updates = changes.pop("num_updates", None)
    if updates is not None:
        changes["config"] = dataclasses.replace(experiment.config, num_updates=updates)
    return dataclasses.replace(experiment, **{name: value for name, value in changes.items() if value is not None})
