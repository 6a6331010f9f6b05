"""Pictures of finished runs."""

from collections.abc import Mapping
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


def curves(
    metrics: Metrics,
    config: Config,
    path: Path,
    final: Mapping[str, Any] | None = None,
    eval_return: np.ndarray | None = None,
) -> None:
    """The return of all seeds with its interquartile mean and interval, and below it the diagnostics.

    Args:
      metrics: leaves [num_seeds, num_updates].
      config: of the runs.
      path: of the PNG file.
      final: the final return to quote, as `results.summary` has it; by default that of the runs as they are.
      eval_return: [num_seeds, num_updates] mean return of the evaluations, NaN where none was.
    """
    figure = Figure(figsize=(10, 7.5), dpi=120, layout="constrained")
    grid = figure.add_gridspec(2, len(DIAGNOSTICS), height_ratios=(1.7, 1))
    num_seeds = metrics.num_episodes.shape[0]

    axes = figure.add_subplot(grid[0, :])
    updates, returns = results.return_curve(metrics)
    steps = updates * config.batch_size
    axes.plot(steps, returns.T, color="0.55", alpha=max(0.08, min(0.45, 4 / num_seeds)), linewidth=0.8)
    band(axes, steps, returns)
    if eval_return is not None:
        done = np.flatnonzero(~np.isnan(eval_return).any(axis=0))
        values = results.interquartile_mean(eval_return[:, done])
        axes.plot((done + 1) * config.batch_size, values, "o-", color="C3", markersize=3, label="evaluations")
    if final is None:
        returns = results.final_return(metrics)
        final = {"interquartile_mean": results.interquartile_mean(returns), "interval_95": results.interval(returns)}
    low, high = final["interval_95"]
    axes.set_title(
        f"{config.env}, {num_seeds} seeds: final return {final['interquartile_mean']:.4g} [{low:.4g}, {high:.4g}]",
        loc="left",
    )
    axes.set_ylabel("return of finished episodes")
    axes.legend(loc="best", frameon=False)
    steps_axis(axes)

    for column, (name, label) in enumerate(DIAGNOSTICS.items()):
        axes = figure.add_subplot(grid[1, column])
        values = getattr(metrics, name).astype(np.float64)
        chosen = np.unique(np.linspace(0, values.shape[1] - 1, 200).round().astype(int))
        _median(axes, (chosen + 1) * config.batch_size, values[:, chosen])
        axes.set_title(label, fontsize=10)
        steps_axis(axes)
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


def band(
    axes: Any, steps: np.ndarray, values: np.ndarray, color: Any = "C0", label: str = "interquartile mean"
) -> None:
    """Interquartile mean and interval of values [runs, points], over the points that every run has."""
    known = ~np.isnan(values).any(axis=0)
    if not known.any():
        return
    steps, values = steps[known], values[:, known]
    axes.plot(steps, results.interquartile_mean(values), color=color, linewidth=2, label=label)
    if len(values) > 1:
        axes.fill_between(steps, *results.interval(values), color=color, alpha=0.25, linewidth=0, label="95% interval")


def _median(axes: Any, steps: np.ndarray, values: np.ndarray) -> None:
    """Median and middle 90% of values [runs, points]; a diverged run drops out where it is not finite."""
    finite = np.where(np.isfinite(values), values, np.nan)
    known = ~np.isnan(finite).all(axis=0)
    if not known.any():
        return
    low, median, high = np.nanquantile(finite[:, known], (0.05, 0.5, 0.95), axis=0)
    axes.plot(steps[known], median, color="C1", linewidth=1.3)
    axes.fill_between(steps[known], low, high, color="C1", alpha=0.25, linewidth=0)


def steps_axis(axes: Any) -> None:
    """Environment steps from left to right, a faint grid, no frame."""
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("environment steps per run", fontsize=9)
    axes.margins(x=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def cells(axes: Any, values: np.ndarray, limits: tuple[float, float], colors: Any, texts: np.ndarray) -> Any:
    """A heat map of values [rows, columns], the first row below, with a text in each cell; the image, for a colour bar.

    Args:
      axes: to draw on.
      values: [rows, columns]; what is not finite takes the colormap's colour for that.
      limits: values at the ends of the colormap.
      colors: the colormap or its name.
      texts: [rows, columns] strings.
    """
    image = axes.imshow(np.ma.masked_invalid(values), origin="lower", aspect="auto", cmap=colors, clim=limits)
    dark = image.to_rgba(image.get_array())[..., :3] @ (0.3, 0.59, 0.11) < 0.5
    for row, column in np.ndindex(values.shape):
        color = "white" if dark[row, column] else "black"
        axes.text(column, row, texts[row, column], ha="center", va="center", size=9, color=color)
    axes.tick_params(length=0)
    return image
