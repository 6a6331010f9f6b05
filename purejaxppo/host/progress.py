"""What a person sees while many runs train."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from purejaxppo.host.sweeps import Report


@contextmanager
def bar(console: Console, name: str, num_runs: int, num_steps: int) -> Iterator[Callable[[Report], None]]:
    """A progress bar, drawn from the first report on; yields the function that `sweep` calls with its reports.

    Args:
      console: to draw on.
      name: of what is trained.
      num_runs: of the whole sweep.
      num_steps: environment steps of the whole sweep.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[score]}"),
    )
    progress = Progress(*columns, console=console)
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
    if report.metrics is None or not (ended := report.metrics.num_episodes > 0).any():
        return ""
    return f"mean return {np.mean(report.metrics.episode_return[ended]):.4g}"
