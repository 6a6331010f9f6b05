"""What a person sees while many runs train."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from purejaxppo.host.sweeps import Report
from purejaxppo.host.training import Listener, Piece

COLUMNS = (
    SpinnerColumn(),
    TextColumn("{task.description}"),
    BarColumn(),
    TaskProgressColumn(),
    TextColumn("{task.fields[speed]}"),
    TimeRemainingColumn(),
    TextColumn("{task.fields[score]}"),
)


@contextmanager
def training_bar(console: Console, name: str, update_steps: int, done: int, num_updates: int) -> Iterator[Listener]:
    """A progress bar of runs that train all at once; yields what `training.train` is to call.

    Args:
      console: to draw on.
      name: of what is trained.
      update_steps: environment steps of an update of all runs.
      done: updates before the start.
      num_updates: of each run.
    """
    with Progress(*COLUMNS, console=console) as progress:
        total = num_updates * update_steps
        task = progress.add_task(f"{name}: compiling", total=total, completed=done * update_steps, speed="", score="")
        last_done, last_time = done, 0.0

        def moved(piece: Piece) -> None:
            nonlocal last_done, last_time
            now = time.perf_counter()
            steps = (piece.update_index - last_done) * update_steps
            # The first piece waited for the compiler.
            speed = f"{steps / (now - last_time):,.0f} steps/s" if last_time else ""
            score = _mean_return(piece.metrics["episode_return"], piece.metrics["num_episodes"])
            score = score or progress.tasks[task].fields["score"]
            progress.update(task, description=name, advance=steps, speed=speed, score=score)
            last_done, last_time = piece.update_index, now

        yield moved


@contextmanager
def bar(console: Console, name: str, num_runs: int, num_steps: int) -> Iterator[Callable[[Report], None]]:
    """A progress bar, drawn from the first report on; yields the function that `sweep` calls with its reports.

    Args:
      console: to draw on.
      name: of what is trained.
      num_runs: of the whole sweep.
      num_steps: environment steps of the whole sweep.
    """
    progress = Progress(*COLUMNS, console=console)
    task = progress.add_task(f"{name}: compiling", total=num_steps, speed="", score="")
    last = None

    def moved(report: Report) -> None:
        nonlocal last
        now = time.perf_counter()
        if last is None:  # the first report: what was found done
            progress.start()
            progress.update(task, completed=num_steps * report.num_runs_done // num_runs)
        elif report.num_steps:
            waited = progress.tasks[task].description.endswith("compiling")  # the first piece, for the compiler
            progress.update(
                task,
                description=f"{report.num_runs_done:,}/{num_runs:,} runs of {name}",
                advance=report.num_steps,
                speed="" if waited else f"{report.num_steps / (now - last):,.0f} steps/s",
                score=_score(report) or progress.tasks[task].fields["score"],
            )
        else:
            progress.update(task, description=f"{report.num_runs_done:,}/{num_runs:,} runs of {name}")
        last = now

    try:
        yield moved
    finally:
        if last is not None:
            progress.stop()


def _score(report: Report) -> str:
    """The mean return of the episodes that ended lately."""
    if report.metrics is None:
        return ""
    return _mean_return(report.metrics.episode_return, report.metrics.num_episodes)


def _mean_return(episode_return: Any, num_episodes: Any) -> str:
    ended = num_episodes > 0
    return f"mean return {np.mean(episode_return[ended]):.4g}" if ended.any() else ""
