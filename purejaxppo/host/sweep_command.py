"""`purejaxppo sweep` and `purejaxppo plot`: what they print and leave."""

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from purejaxppo import kinds, results
from purejaxppo.config import Config, HParams
from purejaxppo.host import chunks, experiment, files, memory, plots, progress, store, sweep_axes, sweep_plots
from purejaxppo.host.programs import compile_group
from purejaxppo.host.sweeps import SweepResult, sweep
from purejaxppo.plan import Plan, make_plan
from purejaxppo.settings import varying
from purejaxppo.sweep import measure, num_bytes_of_metrics

SHOWN = 10  # settings in the printed table
MEASURED = 4  # groups of which a dry run trains a piece

Settings = tuple[Sequence[Config], HParams]


def train(
    out: Path,
    toml: str,
    settings: Settings,
    num_seeds: int,
    seed: int,
    threshold: float | None,
    **options: Any,
) -> int:
    """Trains what is not done yet and leaves pictures, summary.json and runs.csv; returns the exit code."""
    configs, hparams = settings
    num_runs = len(configs) * num_seeds
    num_steps = num_seeds * sum(config.num_updates * config.batch_size for config in configs)
    with progress.bar(Console(stderr=True), _name(configs), num_runs, num_steps) as moved:
        result = sweep(configs, hparams, num_seeds, seed, directory=out, progress=moved, **options)
    files.replace(out / "sweep.toml", toml.encode())
    return report(out, result, threshold)


def report(out: Path, result: SweepResult, threshold: float | None = None) -> int:
    """Draws and summarises a finished sweep; returns the exit code."""
    summaries = result.summary(threshold)
    axes = result.axes
    with files.partial(out / "runs.csv") as path:
        result.to_dataframe().to_csv(path, index=False)
    rows = [
        {"setting": index, **{name: column[index] for name, column in axes.items()}, **row}
        for index, row in enumerate(summaries)
    ]
    content = {
        "best": results.best(summaries),
        "num_settings": len(summaries),
        "num_seeds": result.plan.num_seeds,
        "seed": result.plan.seed,
        "settings": rows,
        "machine": files.machine(),
        "versions": files.versions(),
    }
    files.replace(out / "summary.json", json.dumps(files.plain(content), indent=2).encode())
    pictures = sweep_plots.pictures(result, axes, out)
    Console().print(_table(result, summaries))
    names = ", ".join(path.name for path in pictures)
    print(f"{out}/: {names}, summary.json, runs.csv, chunks/")
    return 0 if all(row["diverged"] == 0 for row in summaries) else 1


def plot(directory: Path, threshold: float | None) -> int:
    """Draws a finished run or sweep again."""
    if chunks.find(directory) is not None:
        return report(directory, SweepResult.load(directory), threshold)
    if not (directory / "metrics.npz").exists():
        raise ValueError(f"{directory}: holds neither a finished run nor a sweep")
    settings = experiment.read(directory / "config.toml")
    with files.partial(directory / "curves.png") as path:
        plots.curves(store.read_metrics(directory / "metrics.npz"), settings.config, path)
    print(f"{directory}/curves.png")
    return 0


def dry_run(settings: Settings, num_seeds: int, seed: int, chunk_size: int | None, out: Path) -> int:
    """Prints groups, chunks, memory and time. Trains a short piece of the first groups to know; writes nothing."""
    plan = make_plan(*settings, num_seeds, seed, chunk_size)
    memory.check_results(plan)
    plan = chunks.adopt(out, plan, chunk_size) or memory.fit_plan(plan, chunk_size)
    console = Console()
    rows = Table("program", "runs", "chunks of", "memory of a device", "compiling", "training", title=_title(plan))
    per_step, compiling, training = [], [], []
    for index, group in enumerate(plan.groups):
        chunk = plan.chunk(next(i for i, (each, _) in enumerate(plan.places) if each is group))
        num_runs = len(group.settings) * num_seeds
        num_chunks = -(-num_runs // group.chunk_size)
        steps = num_chunks * group.shape.num_runs * group.config.num_updates * group.config.batch_size
        num_bytes = "not tried"
        if index < MEASURED:
            with console.status(f"training a piece of group {index + 1} of {len(plan.groups)}"):
                started = time.perf_counter()
                programs = compile_group(chunk.config, chunk.shape)
                compiling.append(time.perf_counter() - started)
                seconds = measure(programs, chunk)
            num_bytes = memory.text(programs.num_bytes)
            per_step.append(seconds / (group.config.batch_size * group.shape.num_runs))
        training.append(steps * float(np.mean(per_step)))
        rows.add_row(
            sweep_axes.setting(_static(plan), group.settings[0]) or "the only one",
            f"{num_runs:,}",
            f"{num_chunks:,} x {group.chunk_size:,}",
            num_bytes,
            _duration(float(np.mean(compiling))),
            _duration(training[-1]),
        )
    console.print(rows)
    total = float(np.mean(compiling)) * len(plan.groups) + sum(training)
    guessed = f"; the last {len(plan.groups) - MEASURED} groups as the others" if len(plan.groups) > MEASURED else ""
    print(
        f"{plan.num_runs:,} runs, {len(plan.groups)} program(s), {len(plan.places):,} chunk(s): "
        f"about {_duration(total)} here, by a short piece just trained{guessed}; "
        f"the results take {memory.text(num_bytes_of_metrics(plan))}"
    )
    return 0


def _title(plan: Plan) -> str:
    return f"{_name(plan.configs)}: {len(plan.configs)} settings x {plan.num_seeds} seeds"


def _static(plan: Plan) -> dict[str, tuple[Any, ...]]:
    """The static fields that differ between settings."""
    return {
        name: values
        for name, values in varying(plan.configs, plan.hparams).items()
        if name in kinds.of(plan.hparams).config_fields
    }


def _table(result: SweepResult, summaries: list[dict[str, Any]]) -> Table:
    """The best settings, best first."""
    order = sorted(range(len(summaries)), key=lambda i: -_rank(summaries[i]))[:SHOWN]
    timed = "steps_to_threshold" in summaries[0]
    axes = result.axes
    more = f"; the best {SHOWN} of them" if len(summaries) > SHOWN else ""
    table = Table(*axes, "final return", "area under curve", "P(> best)", title=_title(result.plan) + more)
    if timed:
        table.add_column(f"steps to {summaries[0]['steps_to_threshold']['threshold']:g}")
    for index in order:
        row = summaries[index]
        better = row["improvement_over_best"]
        cells = [sweep_axes.text(column[index]) for column in axes.values()]
        cells += [sweep_axes.quoted(row, " ")]
        cells += [sweep_axes.number(row["area_under_curve"]["interquartile_mean"])]
        cells += ["the best" if index == order[0] else f"{better['probability']:.2f}"]
        if timed:
            reached = row["steps_to_threshold"]
            cells.append(f"{reached['median']:,.0f} ({reached['share']:.0%})")
        table.add_row(*cells)
    return table


def _rank(summary: dict[str, Any]) -> float:
    """The final return, the unknown last."""
    value = summary["final_return"]["interquartile_mean"]
    return -math.inf if math.isnan(value) else value


def _duration(seconds: float) -> str:
    """Seconds as a person reads them."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.0f} h"


def _name(configs: Sequence[Any]) -> str:
    return " and ".join(dict.fromkeys(config.env for config in configs))
