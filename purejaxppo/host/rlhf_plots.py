"""Pictures of RLHF: what is gained for how much KL."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00")
STYLE: Any = {"font.size": 11, "axes.titlesize": 12, "axes.spines.top": False, "axes.spines.right": False}


def frontier(path: Path, summary: dict[str, Any]) -> None:
    """Score and gold reward of every setting against the square root of its KL to the reference, a colour a number of
    pairs; bars are the lowest and highest seed.

    Args:
      path: PNG to write.
      summary: as `rlhf_report.write` makes it.
    """
    numbers = list(dict.fromkeys(row["num_pairs"] for row in summary["settings"]))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12, 5.2), dpi=130, layout="constrained")
        seeds = summary["num_seeds"]
        figure.suptitle(
            f"{summary['algorithm']} on {summary['task']}: {seeds} seeds a point, bars from lowest to highest"
        )
        left, right = figure.subplots(1, 2, sharex=True)
        for number, colour in zip(numbers, COLOURS * len(numbers), strict=False):
            rows = [row for row in summary["settings"] if row["num_pairs"] == number]
            best = [row for row in summary["best_of_n"] if row["num_pairs"] == number]
            label = "runs" if number is None else f"{number:,} pairs"
            for axes, name in ((left, "score"), (right, "gold")):
                _points(axes, rows, name, colour, label)
                kl = [row["kl"] for row in best]
                axes.plot(
                    np.sqrt(kl), [np.mean(row[name]) for row in best], ":", color=colour, label=f"best of n, {label}"
                )
        _optimum(left, summary["settings"])
        for axes, name in ((left, "what is optimised (score)"), (right, "what is wanted (gold)")):
            axes.set(
                title=name,
                xlabel="square root of the KL to the reference (nats per response)",
                ylabel=name.split("(")[1][:-1],
            )
        right.legend(frameon=False, fontsize=9)
        figure.savefig(path, format="png")


def _points(axes: Axes, rows: Sequence[dict[str, Any]], name: str, colour: str, label: str) -> None:
    """A point a setting, in the order of their KL, with the coefficient beside it."""
    rows = sorted(
        (row for row in rows if None not in row["ref_kl"] + row[name]), key=lambda row: float(np.mean(row["ref_kl"]))
    )
    if not rows:
        return
    x = np.array([np.mean(np.sqrt(np.maximum(row["ref_kl"], 0))) for row in rows])
    y = np.array([np.mean(row[name]) for row in rows])
    low, high = (np.array([pick(row[name]) for row in rows]) for pick in (min, max))
    axes.errorbar(x, y, yerr=[y - low, high - y], fmt="o-", color=colour, label=label, capsize=2, markersize=4)
    for row, at, height in zip(rows, x, y, strict=True):
        axes.annotate(
            f"{row['kl_coef']:g}", (at, height), textcoords="offset points", xytext=(4, 4), fontsize=7, color=colour
        )


def _optimum(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """The exact curve above which no policy can be, where it is known."""
    best = sorted((row["optimum"]["kl"], row["optimum"]["reward"]) for row in rows if row["optimum"])
    if best:
        kl, reward = np.array(best).T
        axes.plot(np.sqrt(kl), reward, "k--", linewidth=1, label="best possible, exact")
        axes.legend(frameon=False, fontsize=9)
