"""`purejaxppo bandit`: the text's figures on the bandit beside ours, as a table, bandit.json and pictures."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from purejaxppo import bandit
from purejaxppo.bandit import BanditConfig, BanditHParams, BanditTrace
from purejaxppo.config import check_size
from purejaxppo.host import bandit_facts, bandit_plots, files
from purejaxppo.host.bandit_facts import Row, Summary

MAP_AXES: dict[str, tuple[float, ...]] = {
    "num_epochs": (1, 4, 10, 40, 100),
    "num_pulls": (4, 8, 12, 24, 64),
    "clip_eps": (0.05, 0.1, 0.2, 0.5, 1.0, math.inf),
}
# The interval of a share of one half, the widest there is, is then 1.96 points wide.
MAP_SEEDS = 10_000

CAPTION = """Interval: 95% of what 300 seeds, as in the text, would give around ours (exact: no seed changes it). \
Agrees: "yes", the text's figure is in the interval; "rounded", a figure that is printed so is in it; else "no". \
With few seeds ours is a draw too, and about one right figure in six falls outside: --num-seeds 10000 settles it. \
Wrong arm: the most likely arm, of probability p, is not a best one."""


def run_bandit(num_seeds: int = 300, seed: int = 0, out: Path | None = None, map: bool = False) -> int:
    """Prints the table and writes it to bandit.md and, with the curves, to bandit.json; bandit.png, clip.png and, with
    `map`, map.png.

    Args:
      num_seeds: runs behind each figure.
      seed: of all of them.
      out: directory to write to; by default runs/bandit-TIME.
      map: also the heat maps of clip_eps, num_pulls and num_epochs.

    Returns:
      The exit code: 0, or 1 where a run did not stay finite.

    Raises:
      ValueError: unless `num_seeds` is a positive integer, and for a directory that holds such a run already.
    """
    console = Console()
    check_size("num_seeds", num_seeds)
    directory = out or files.fresh("bandit")
    files.claim(directory, marker="bandit.json")
    with console.status(f"{num_seeds} seeds of each setting"):
        runs = bandit_facts.run_experiments(num_seeds, seed)
        rows = bandit_facts.compare(runs, seed)
    console.print(_table(rows, num_seeds))
    bandit_plots.save_learners(directory / "bandit.png", runs.demo)
    bandit_plots.save_clip(directory / "clip.png")
    report = {
        "num_seeds": num_seeds,
        "seed": seed,
        "versions": {"jax": jax.__version__, "numpy": np.__version__},
        "figures": [{**vars(row), "agrees": row.agrees} for row in rows],
        "curves": {name: _curves(runs.demo, index) for index, name, _ in bandit_plots.LEARNERS},
    }
    if map:
        with console.status(f"map: {MAP_SEEDS} seeds a cell"):
            cells = map_settings(seed)
        bandit_plots.save_map(directory / "map.png", cells, MAP_AXES, MAP_SEEDS)
        report["map"] = {"num_seeds": MAP_SEEDS, "axes": MAP_AXES, **cells}
    files.replace(directory / "bandit.json", json.dumps(files.plain(report), indent=1, allow_nan=False).encode())
    files.replace(directory / "bandit.md", markdown(rows, num_seeds, seed).encode())
    names = ["bandit.json", "bandit.md", "bandit.png", "clip.png"] + ["map.png"] * map
    console.print(f"{directory}/: {', '.join(names)}")
    finite = all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(runs))
    if not finite:
        console.print("A run did not stay finite.", style="red")
    return 0 if finite else 1


class Cell(NamedTuple):
    """What the map keeps of a run: after its last iteration."""

    wrong: Any
    expected_reward: Any


def summarize_cell(trace: BanditTrace) -> Cell:
    """The part of a trace that the map needs."""
    means = np.asarray(BanditHParams().means, np.float32)
    return Cell(bandit.on_wrong_arm(trace.policy[-1], means), trace.expected_reward[-1])


def map_settings(seed: int, num_seeds: int = MAP_SEEDS, num_iterations: int = 10) -> dict[str, np.ndarray]:
    """Wrong-arm share and mean expected reward after 10 iterations, with 95% intervals, over `MAP_AXES`.

    Returns:
      "wrong_arm", "expected_reward" and their "_low" and "_high", each [num_epochs, num_pulls, clip_eps].
    """
    hparams = BanditHParams(clip_eps=MAP_AXES["clip_eps"])
    parts = []
    for num_epochs in MAP_AXES["num_epochs"]:
        for num_pulls in MAP_AXES["num_pulls"]:
            config = BanditConfig(int(num_pulls), int(num_epochs), num_iterations)
            cells = bandit.simulate_seeds(config, hparams, num_seeds, seed, summarize_cell)
            reward, counts = cells.expected_reward.T, cells.wrong.sum(axis=1)
            wrong = (counts / num_seeds, *bandit_plots.wilson(counts, num_seeds))
            parts.append((*wrong, reward.mean(axis=0, dtype=np.float64), *bandit_plots.normal(reward)))
    shape = tuple(len(values) for values in MAP_AXES.values())
    names = [f"{name}{end}" for name in ("wrong_arm", "expected_reward") for end in ("", "_low", "_high")]
    return {name: np.array(values).reshape(shape) for name, values in zip(names, zip(*parts, strict=True), strict=True)}


def markdown(rows: list[Row], num_seeds: int, seed: int) -> str:
    """The table for a file."""
    lines = [
        "# The bandit",
        "",
        f"{num_seeds:,} seeds (seed {seed}), jax {jax.__version__}. {CAPTION}",
        "",
        "| | figure | text | ours | interval | agrees |",
        "|---|---|---|---|---|---|",
        *(f"| {' | '.join(_cells(row))} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _table(rows: list[Row], num_seeds: int) -> Table:
    title = f"The bandit: the text's figures and ours, from {num_seeds} seeds"
    table = Table(title=title, caption=CAPTION, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.caption_justify = "left"
    for name, justify in (("", "right"), ("figure", "left"), ("text", "right"), ("ours", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("interval", justify="center", no_wrap=True)
    table.add_column("agrees")
    previous = ""
    for row in rows:
        if row.fact != previous and previous:
            table.add_section()
        fact, *cells, agrees = _cells(row)
        style = {"yes": "green", "rounded": "yellow", "no": "red"}[agrees]
        table.add_row(fact if fact != previous else "", *cells, f"[{style}]{agrees}[/{style}]")
        previous = row.fact
    return table


def _cells(row: Row) -> list[str]:
    bounds = "exact" if row.interval is None else f"{_short(row.interval[0])}..{_short(row.interval[1])}"
    return [row.fact, row.what, row.text, _short(row.ours), bounds, row.agrees]


def _short(value: float) -> str:
    if not math.isfinite(value) or value == round(value):
        return f"{value:.0f}"
    return f"{value:.4f}" if abs(value) < 0.01 else f"{value:.3f}"


def _curves(demo: Summary, index: int) -> dict[str, Any]:
    """Means over the seeds, and the 95% intervals that the picture shows."""
    reward, counts, seeds = demo.expected_reward[index], demo.wrong[index].sum(axis=0), demo.wrong.shape[1]
    low, middle, high = np.quantile(demo.first_kl[index], [0.1, 0.5, 0.9], axis=0)
    return {
        "expected_reward": {"mean": reward.mean(axis=0), "interval": bandit_plots.normal(reward)},
        "wrong_arm": {"share": counts / seeds, "interval": bandit_plots.wilson(counts, seeds)},
        "entropy": {"mean": demo.entropy[index].mean(axis=0)},
        "kl": {"mean": demo.kl[index].mean(axis=0)},
        "first_batch_kl": {"median": middle, "quantile_10": low, "quantile_90": high},
    }
