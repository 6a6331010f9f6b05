"""Pictures of a finished sweep: curves of the settings, a heat map of a two-axis grid, marginals of anything else.

Axes are a mapping from each field that differs between the settings to its value in each of them, in the order of the
sweep. Summaries are those of `results.summary`, and its rule for diverged and unknown runs holds here too.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import patheffects
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from purejaxppo import results
from purejaxppo.host import plots, sweep_axes
from purejaxppo.host.sweep_axes import Axes, Summaries
from purejaxppo.host.sweep_curves import curves
from purejaxppo.types import Metrics

BEST, CLOSE, OTHER = "#D55E00", "#0072B2", "0.6"
FRAMES: dict[str, dict[str, Any]] = {
    BEST: {"edgecolor": BEST, "linewidth": 3},
    CLOSE: {
        "edgecolor": "black",
        "linewidth": 1,
        "linestyle": (0, (4, 2)),
        "path_effects": [patheffects.withStroke(linewidth=2.2, foreground="white")],  # to be seen on any colour
    },
}
RETURN = "final return, interquartile mean"


def pictures(result: Any, axes: Axes, out_dir: Path) -> list[Path]:
    """Whatever pictures suit the sweep: curves always, a heat map or marginals by its axes.

    Returns of different environments do not compare, so each environment of a sweep has pictures of its own.

    Args:
      result: with `configs`, a Config a setting, and `metrics`, leaves [num_settings, num_seeds, max_updates].
      axes: field -> its value in each setting; only fields that differ.
      out_dir: a directory that exists.

    Returns:
      The PNG files: curves.png, and heat_map.png or marginals.png; with several environments, curves-ENV.png and so on.
    """
    by_env: dict[str, list[int]] = {}
    for index, config in enumerate(result.configs):
        by_env.setdefault(config.env, []).append(index)
    paths = []
    for env, chosen in by_env.items():
        configs = [result.configs[index] for index in chosen]
        metrics = Metrics(*(leaf[chosen] if len(by_env) > 1 else leaf for leaf in result.metrics))
        values = {name: [column[index] for index in chosen] for name, column in axes.items()}
        values = {name: column for name, column in values.items() if len(set(column)) > 1}
        sizes = [config.num_updates for config in configs], [config.batch_size for config in configs]
        summaries = results.summary(metrics, *sizes)
        title = sweep_axes.title(env, summaries)
        end = f"-{env}.png" if len(by_env) > 1 else ".png"
        paths.append(out_dir / f"curves{end}")
        curves(configs, metrics, values, summaries, paths[-1])
        if sweep_axes.is_grid(values):
            paths.append(out_dir / f"heat_map{end}")
            heat_map(values, summaries, title, paths[-1])
        elif values:
            paths.append(out_dir / f"marginals{end}")
            marginals(values, summaries, title, paths[-1])
    return paths


def heat_map(axes: Axes, summaries: Summaries, title: str, path: Path) -> None:
    """Final return of each cell of a two-axis grid, with its interval.

    Args:
      axes: two fields -> their values in each setting, every combination once.
      summaries: one a setting.
      title: of the picture.
      path: of the PNG file.
    """
    (down, rows), (across, columns) = ((name, sweep_axes.levels(column)) for name, column in axes.items())
    places = [(rows.index(row), columns.index(column)) for row, column in zip(axes[down], axes[across], strict=True)]
    order = np.empty((len(rows), len(columns)), int)
    order[tuple(np.transpose(places))] = np.arange(len(places))
    means = np.array([row["final_return"]["interquartile_mean"] for row in summaries])
    texts = np.array([sweep_axes.quoted(row, "\n") for row in summaries])
    finite = means[np.isfinite(means)]
    limits = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)

    size = (min(24, max(7, 1.15 * len(columns) + 3)), min(20, 0.62 * len(rows) + 2.2))
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    panel = figure.add_subplot()
    colors = mpl.colormaps["viridis"].with_extremes(bad="0.85")
    image = plots.cells(panel, means[order], limits, colors, texts[order])
    panel.set_xticks(range(len(columns)), [sweep_axes.text(value) for value in columns])
    panel.set_yticks(range(len(rows)), [sweep_axes.text(value) for value in rows])
    panel.set(xlabel=across, ylabel=down)
    panel.spines[:].set_visible(False)
    kinds = _kinds(summaries)
    for place, kind in zip(places, kinds, strict=True):
        if kind != OTHER:
            panel.add_patch(_frame(place, kind))
    if finite.size:
        figure.colorbar(image, label=RETURN, pad=0.02)
    figure.suptitle(f"{title}: {RETURN}", size=12)
    names = {BEST: "best", CLOSE: "95% interval overlaps the best's"}
    handles = [Patch(fill=False, label=name, **FRAMES[kind]) for kind, name in names.items() if kind in kinds]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, format="png")


def marginals(axes: Axes, summaries: Summaries, title: str, path: Path) -> None:
    """Final return of each setting, with its interval, against each axis in turn.

    Args:
      axes: field -> its value in each setting.
      summaries: one a setting.
      title: of the picture.
      path: of the PNG file.
    """
    num_columns = min(3, len(axes))
    num_rows = -(-len(axes) // num_columns)
    figure = Figure(figsize=(max(6.5, 4.2 * num_columns), 3.6 * num_rows + 0.9), dpi=120, layout="constrained")
    panels = figure.subplots(num_rows, num_columns, sharey=True, squeeze=False)
    for panel in panels.flat[len(axes) :]:
        panel.set_visible(False)
    kinds = _kinds(summaries)
    means = np.array([row["final_return"]["interquartile_mean"] for row in summaries])
    for panel, (name, column) in zip(panels.flat, axes.items(), strict=False):
        if sweep_axes.is_continuous(column):
            places = np.asarray(column, float)
            panel.set_xscale("log" if sweep_axes.is_logarithmic(column) else "linear")
        else:
            places = sweep_axes.strips(column, means)
            _strip_labels(panel, [sweep_axes.text(value) for value in sweep_axes.levels(column)])
        _points(panel, places, summaries, kinds)
        panel.set_xlabel(name)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    for line in panels:
        line[0].set_ylabel(RETURN)
    figure.suptitle(title, size=12)
    figure.legend(handles=_legend(summaries, kinds), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, format="png")


def _kinds(summaries: Summaries) -> list[str]:
    """The colour of each setting: the best, those whose interval overlaps its, and the others. No best of nothing."""
    first = results.best(summaries)
    if not np.isfinite(summaries[first]["final_return"]["interquartile_mean"]):
        return [OTHER] * len(summaries)
    best_low, best_high = summaries[first]["final_return"]["interval_95"]
    kinds = []
    for row in summaries:
        low, high = row["final_return"]["interval_95"]
        kinds.append(CLOSE if low <= best_high and high >= best_low else OTHER)
    kinds[first] = BEST
    return kinds


def _frame(place: tuple[int, int], kind: str) -> Rectangle:
    row, column = place
    inset = 0.04
    return Rectangle(
        (column - 0.5 + inset, row - 0.5 + inset), 1 - 2 * inset, 1 - 2 * inset, fill=False, **FRAMES[kind]
    )


def _strip_labels(panel: Any, labels: Sequence[str]) -> None:
    """Names the strips; sideways where they would run into each other."""
    crowded = max(map(len, labels)) * len(labels) > 40
    panel.set_xticks(range(len(labels)), labels, **({"rotation": 25, "ha": "right"} if crowded else {}))
    panel.set_xlim(-0.6, len(labels) - 0.4)


def _points(panel: Any, places: np.ndarray, summaries: Summaries, kinds: Sequence[str]) -> None:
    """Final returns with their intervals; at the foot of the panel, those that are not finite."""
    means = np.array([row["final_return"]["interquartile_mean"] for row in summaries])
    low, high = np.array([row["final_return"]["interval_95"] for row in summaries]).T
    colors = np.array(kinds)
    finite = np.isfinite(means)
    ends = np.concatenate([means[finite], low[np.isfinite(low)], high[np.isfinite(high)]])
    if not ends.size:
        panel.set_yticks([])
    else:
        margin = 0.06 * (np.ptp(ends) or 1.0)
        panel.set_ylim(ends.min() - margin, ends.max() + margin)
    thin = max(0.25, min(0.9, 60 / len(means)))
    for kind in (OTHER, CLOSE, BEST):
        members = finite & (colors == kind)
        floor = panel.get_ylim()[0]
        panel.vlines(
            places[members], np.maximum(low[members], floor), high[members], color=kind, linewidth=1.1, alpha=thin
        )
        marker, size = ("*", 170) if kind == BEST else ("o", 16)
        panel.scatter(places[members], means[members], s=size, marker=marker, color=kind, linewidth=0, zorder=3)
    panel.scatter(
        places[~finite],
        np.full((~finite).sum(), 0.02),
        marker="x",
        s=22,
        color="black",
        linewidth=1,
        transform=panel.get_xaxis_transform(),
        clip_on=False,
    )


def _legend(summaries: Summaries, kinds: Sequence[str]) -> list[Any]:
    """Only the kinds of points that there are."""
    finite = [np.isfinite(row["final_return"]["interquartile_mean"]) for row in summaries]
    shown = {
        BEST: Line2D([], [], color=BEST, marker="*", markersize=12, linestyle="", label="best"),
        CLOSE: Line2D([], [], color=CLOSE, marker="o", markersize=4, label="95% interval overlaps the best's"),
        OTHER: Line2D([], [], color=OTHER, marker="o", markersize=4, label="other settings"),
    }
    handles = [handle for kind, handle in shown.items() if any(np.logical_and(finite, np.array(kinds) == kind))]
    if not all(finite):
        label = "over a quarter of the runs diverged, or unknown"
        handles.append(Line2D([], [], color="black", marker="x", markersize=5, linestyle="", label=label))
    return handles
