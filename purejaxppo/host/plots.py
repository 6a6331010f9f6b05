"""Pictures of finished runs."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from purejaxppo import results
from purejaxppo.config import Config
from purejaxppo.types import Metrics

DIAGNOSTICS = {
    "approx_kl": "approx KL (nats per update)",
    "clip_fraction": "clip fraction",
    "entropy": "entropy (nats)",
    "explained_variance": "explained variance",
}


def curves(metrics: Metrics, config: Config, path: Path, eval_return: np.ndarray | None = None) -> None:
    """The return of all seeds with its interquartile mean and interval, and below it the diagnostics.

    Args:
      metrics: leaves [num_seeds, num_updates].
      config: of the runs.
      path: of the PNG file.
      eval_return: [num_seeds, num_updates] mean return of the evaluations, NaN where none was.
    """
    figure = Figure(figsize=(10, 7.5), dpi=120, layout="constrained")
    grid = figure.add_gridspec(2, len(DIAGNOSTICS), height_ratios=(1.7, 1))
    num_seeds = metrics.num_episodes.shape[0]

    axes = figure.add_subplot(grid[0, :])
    updates, returns = results.return_curve(metrics)
    steps = updates * config.batch_size
    axes.plot(steps, returns.T, color="0.55", alpha=max(0.08, min(0.45, 4 / num_seeds)), linewidth=0.8)
    _band(axes, steps, returns)
    if eval_return is not None:
        done = np.flatnonzero(~np.isnan(eval_return).any(axis=0))
        values = results.interquartile_mean(eval_return[:, done])
        axes.plot((done + 1) * config.batch_size, values, "o-", color="C3", markersize=3, label="evaluations")
    final = results.final_return(metrics)
    low, high = results.interval(final)
    axes.set_title(
        f"{config.env}, {num_seeds} seeds: final return {results.interquartile_mean(final):.4g} "
        f"[{low:.4g}, {high:.4g}]",
        loc="left",
    )
    axes.set_ylabel("return of finished episodes")
    axes.legend(loc="best", frameon=False)
    _steps_axis(axes)

    for column, (name, label) in enumerate(DIAGNOSTICS.items()):
        axes = figure.add_subplot(grid[1, column])
        values = getattr(metrics, name).astype(np.float64)
        chosen = np.unique(np.linspace(0, values.shape[1] - 1, 200).round().astype(int))
        _median(axes, (chosen + 1) * config.batch_size, values[:, chosen])
        axes.set_title(label, fontsize=10)
        _steps_axis(axes)
    figure.text(
        0.995,
        0.002,
        "Above: grey, each seed; line and band, interquartile mean and its 95% bootstrap interval. "
        "Below: median and middle 90% of the seeds.",
        ha="right",
        va="bottom",
        fontsize=7.5,
        color="0.35",
    )
    figure.get_layout_engine().set(rect=(0, 0.022, 1, 0.978))  # type: ignore[union-attr, call-arg]
    figure.savefig(path, format="png")


def _band(axes: Any, steps: np.ndarray, values: np.ndarray) -> None:
    """Interquartile mean and interval of values [runs, points], over the points that every run has."""
    known = ~np.isnan(values).any(axis=0)
    if not known.any():
        return
    steps, values = steps[known], values[:, known]
    axes.plot(steps, results.interquartile_mean(values), color="C0", linewidth=2, label="interquartile mean")
    axes.fill_between(steps, *results.interval(values), color="C0", alpha=0.25, linewidth=0, label="95% interval")


def _median(axes: Any, steps: np.ndarray, values: np.ndarray) -> None:
    """Median and middle 90% of values [runs, points]; a diverged run drops out where it is not finite."""
    finite = np.where(np.isfinite(values), values, np.nan)
    known = ~np.isnan(finite).all(axis=0)
    if not known.any():
        return
    low, median, high = np.nanquantile(finite[:, known], (0.05, 0.5, 0.95), axis=0)
    axes.plot(steps[known], median, color="C1", linewidth=1.3)
    axes.fill_between(steps[known], low, high, color="C1", alpha=0.25, linewidth=0)


def _steps_axis(axes: Any) -> None:
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("environment steps per run", fontsize=9)
    axes.margins(x=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
