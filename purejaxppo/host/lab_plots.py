"""The picture of the CartPole lab."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from purejaxppo import results
from purejaxppo.types import Metrics

ROWS = {
    "episode_return": "return",
    "approx_kl": "approx KL (nats)",
    "clip_fraction": "clip fraction",
    "entropy": "entropy (nats)",
    "num_epochs": "epochs run",
}


def variants(runs: dict[str, Metrics], batch_size: int, path: Path) -> None:
    """Return, KL, clip fraction, entropy and epochs of every variant: median and middle 90% of the seeds.

    Args:
      runs: by name, metrics [num_seeds, num_updates]; the first half of them on the left, the rest on the right.
      batch_size: environment steps of an update.
      path: of the PNG file.
    """
    names = list(runs)
    columns = [names[: len(names) // 2], names[len(names) // 2 :]]
    figure = Figure(figsize=(11, 14), dpi=110, layout="constrained")
    panels = figure.subplots(len(ROWS), 2, sharex=True, sharey="row")
    for column, members in enumerate(columns):
        for row, (field, label) in enumerate(ROWS.items()):
            axes = panels[row, column]
            for index, name in enumerate(members):
                _curve(axes, runs[name], field, batch_size, color=f"C{4 * column + index}", label=name)
            axes.grid(alpha=0.25)
            axes.margins(x=0)
            axes.spines[["top", "right"]].set_visible(False)
            if column == 0:
                axes.set_ylabel(label)
            if field in ("approx_kl", "num_epochs"):
                axes.set_yscale("log")
        panels[0, column].legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
        panels[-1, column].set_xlabel("environment steps per run")
        panels[-1, column].xaxis.set_major_formatter(EngFormatter(sep=""))
    panels[1, 0].set_ylim(bottom=1e-6)
    panels[-1, 0].set_yticks([1, 2, 5, 10, 20, 40], ["1", "2", "5", "10", "20", "40"])
    num_seeds = len(runs[names[0]].entropy)
    figure.suptitle(f"The CartPole lab, {num_seeds} seeds: median and middle 90% of the seeds", fontsize=13)
    figure.savefig(path, format="png")


def _curve(axes: Any, metrics: Metrics, field: str, batch_size: int, color: str, label: str) -> None:
    if field == "episode_return":
        updates, values = results.return_curve(metrics)
    else:
        values = getattr(metrics, field).astype(np.float64)
        updates = np.arange(1, values.shape[1] + 1)
    low, median, high = np.nanquantile(np.where(np.isfinite(values), values, np.nan), (0.05, 0.5, 0.95), axis=0)
    axes.plot(updates * batch_size, median, color=color, linewidth=1.6, label=label)
    axes.fill_between(updates * batch_size, low, high, color=color, alpha=0.15, linewidth=0)
