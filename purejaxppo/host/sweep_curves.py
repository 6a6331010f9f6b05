"""The learning curves of a sweep."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from purejaxppo import results
from purejaxppo.config import Config
from purejaxppo.host import plots, sweep_axes
from purejaxppo.host.sweep_axes import Axes, Summaries
from purejaxppo.types import Metrics

COLORS = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "C8")  # that the eye can tell apart, without the grey one
MOST_BACKGROUND = 300
NUM_POINTS = 50  # of a curve: fewer than of a single setting's, since many curves share a panel

Lines = Mapping[int, tuple[np.ndarray, np.ndarray]]  # setting -> (environment steps [P], returns [num_seeds, P])


def curves(configs: Sequence[Config], metrics: Metrics, axes: Axes, summaries: Summaries, path: Path) -> None:
    """Returns over training: interquartile mean and 95% interval of each setting.

    One setting has the picture of a training run. Up to eight share a panel; a two-axis grid has a panel for each value
    of its first axis. Of more settings the best eight stand out of the others.

    Args:
      configs: one a setting.
      metrics: leaves [num_settings, num_seeds, max_updates].
      axes: field -> its value in each setting.
      summaries: one a setting.
      path: of the PNG file.
    """
    if len(configs) == 1:
        plots.curves(_runs(metrics, configs, 0), configs[0], path, final=summaries[0]["final_return"])
        return
    means = [row["final_return"]["interquartile_mean"] for row in summaries]
    ranked = sorted(range(len(configs)), key=lambda index: (math.isnan(means[index]), -means[index]))
    widths = [len(set(column)) for column in axes.values()]
    if len(configs) > len(COLORS) and sweep_axes.is_grid(axes) and max(widths) <= len(COLORS):
        figure = _panels(_lines(metrics, configs, ranked), axes)
    else:
        leaders, others = ranked[: len(COLORS)], ranked[len(COLORS) :]
        background = others[:: -(-len(others) // MOST_BACKGROUND) or 1]
        labels = [f"{sweep_axes.quoted(summaries[i], ' ')}: {sweep_axes.setting(axes, i)}" for i in leaders]
        if others:
            labels.append(f"the other {len(others)} settings; the interval is the best one's")
        figure = _ranked(_lines(metrics, configs, leaders), _lines(metrics, configs, background), labels)
    what = "interquartile mean and 95% interval of the return" if summaries[0]["num_seeds"] > 1 else "return"
    figure.suptitle(f"{sweep_axes.title(configs[0].env, summaries)}: {what}", size=12)
    figure.savefig(path, format="png")


def _runs(metrics: Metrics, configs: Sequence[Config], index: int) -> Metrics:
    """The metrics of one setting, [num_seeds, num_updates]."""
    return Metrics(*(leaf[index, :, : configs[index].num_updates] for leaf in metrics))


def _lines(metrics: Metrics, configs: Sequence[Config], chosen: Sequence[int]) -> Lines:
    lines = {}
    for index in chosen:
        updates, returns = results.return_curve(_runs(metrics, configs, index), NUM_POINTS)
        lines[index] = (updates * configs[index].batch_size, returns)
    return lines


def _panels(lines: Lines, axes: Axes) -> Figure:
    """A panel for each value of the first axis, a line for each of the second."""
    (first, by_panel), (second, by_line) = axes.items()
    shown, levels = sweep_axes.levels(by_panel), sweep_axes.levels(by_line)
    num_columns = min(3, len(shown)) if len(shown) != 4 else 2
    num_rows = -(-len(shown) // num_columns)
    figure = Figure(figsize=(4.2 * num_columns, 3.1 * num_rows + 1), dpi=120, layout="constrained")
    panels = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False)
    colors = mpl.colormaps["viridis"](np.linspace(0, 0.9, len(levels)))
    for number, (panel, value) in enumerate(zip(panels.flat, shown, strict=False)):
        panel.set_title(f"{first} = {sweep_axes.text(value)}", size=10)
        for index, (steps, returns) in lines.items():
            if by_panel[index] == value:
                plots.band(panel, steps, returns, color=colors[levels.index(by_line[index])])
        plots.steps_axis(panel)
        lowest = number + num_columns >= len(shown)
        panel.tick_params(labelbottom=lowest)
        if not lowest:
            panel.set_xlabel("")
    for panel in panels.flat[len(shown) :]:
        panel.set_axis_off()
    for line in panels:
        line[0].set_ylabel("return")
    handles = [
        Line2D([], [], color=color, linewidth=2, label=sweep_axes.text(value))
        for color, value in zip(colors, levels, strict=True)
    ]
    figure.legend(handles=handles, title=second, loc="outside lower center", ncols=len(levels), frameon=False)
    return figure


def _ranked(leaders: Lines, background: Lines, labels: Sequence[str]) -> Figure:
    """The best settings in colours, named from the best down; the others, if any, in grey."""
    labels = [textwrap.fill(label, 140, subsequent_indent="    ", break_on_hyphens=False) for label in labels]
    height = 5.2 + 0.19 * "\n".join(labels).count("\n")
    figure = Figure(figsize=(10, height), dpi=120, layout="constrained")
    panel = figure.add_subplot()
    grey = [np.stack([steps, results.interquartile_mean(returns)], axis=-1) for steps, returns in background.values()]
    panel.add_collection(LineCollection(grey, colors="0.8", linewidths=0.8, zorder=0.5))
    for color, (steps, returns) in zip(COLORS, leaders.values(), strict=False):
        if background and color != COLORS[0]:  # eight bands over each other hide the lines: only the best has one
            panel.plot(steps, results.interquartile_mean(returns), color=color, linewidth=1.4)
        else:
            plots.band(panel, steps, returns, color=color)
    panel.set_ylabel("return of finished episodes")
    plots.steps_axis(panel)
    colors = [*COLORS[: len(leaders)], "0.8"]
    figure.legend(
        handles=[
            Line2D([], [], color=color, linewidth=2, label=label) for color, label in zip(colors, labels, strict=False)
        ],
        title="final return [95% interval]: setting, from the best down",
        loc="outside lower left",
        frameon=False,
        fontsize=8.5,
        title_fontsize=8.5,
        alignment="left",
    )
    return figure
