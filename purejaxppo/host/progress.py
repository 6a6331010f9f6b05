"""What a person sees while many runs train."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from purejaxppo.config import Config
from purejaxppo.types import Metrics


@contextmanager
def bar(console: Console, config: Config, num_runs: int) -> Iterator[Callable[[int, Metrics], None]]:
    """A progress bar; yields the function that `sweep` calls with (updates done, latest metrics)."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[score]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("compiling", total=config.num_updates, speed="", score="")
        last = time.perf_counter()
        done = 0

        def moved(updates: int, metrics: Metrics) -> None:
            nonlocal last, done
            now = time.perf_counter()
            speed = (updates - done) * config.batch_size * num_runs / (now - last)
            last = now
            first, done = done == 0, updates
            ended = metrics.num_episodes > 0
            score = f"mean return {np.mean(metrics.episode_return[ended]):.4g}" if ended.any() else ""
            progress.update(
                task,
                description=f"{num_runs} x {config.env}",
                completed=updates,
                speed="" if first else f"{speed:,.0f} steps/s",  # the first piece waited for the compiler
                score=score,
            )

        yield moved
