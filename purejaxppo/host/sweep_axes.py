"""A sweep on paper: the order of the values of its axes, where each setting stands, and how all of it is written.

Axes are a mapping from each field that differs between the settings to its value in each of them, in the order of the
sweep.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Axes = Mapping[str, Sequence[Any]]
Summaries = Sequence[dict[str, Any]]  # of `results.summary`

MOST_CATEGORIES = 6  # numbers of so few values are shown evenly spaced


def is_grid(axes: Axes) -> bool:
    """Whether two axes take every combination of their values, each once."""
    pairs = list(zip(*axes.values(), strict=True))
    return len(axes) == 2 and len(set(pairs)) == len(pairs) == math.prod(len(set(column)) for column in axes.values())


def levels(column: Sequence[Any]) -> list[Any]:
    """The values of an axis, each once: numbers in order, others as they come."""
    values = list(dict.fromkeys(column))
    return sorted(values) if all(map(_is_number, values)) else values


def is_continuous(column: Sequence[Any]) -> bool:
    """Whether an axis is a line of numbers, not a few strips: finite numbers, and more than a few different ones."""
    values = levels(column)
    return all(_is_number(value) and math.isfinite(value) for value in values) and len(values) > MOST_CATEGORIES


def is_logarithmic(column: Sequence[Any]) -> bool:
    """Whether numbers span more than a decade and lie more evenly on a logarithmic axis than on a linear one."""
    low, middle, high = np.quantile(np.asarray(column, float), (0, 0.5, 1))
    if low <= 0 or high <= 10 * low:
        return False
    return bool(abs(np.log(middle / low) / np.log(high / low) - 0.5) < abs((middle - low) / (high - low) - 0.5))


def strips(column: Sequence[Any], heights: np.ndarray) -> np.ndarray:
    """Where each setting stands on an axis of strips, one a level: side by side, from the lowest to the highest."""
    values = levels(column)
    strip = np.array([values.index(value) for value in column])
    places = strip.astype(float)
    for index in range(len(values)):
        members = np.flatnonzero(strip == index)
        if len(members) > 1:
            places[members[np.argsort(heights[members])]] += np.linspace(-0.3, 0.3, len(members))
    return places


def setting(axes: Axes, index: int) -> str:
    """One setting in words."""
    return ", ".join(f"{name}={text(column[index])}" for name, column in axes.items())


def text(value: Any) -> str:
    """A field's value, as short as it can be written."""
    if isinstance(value, bool | np.bool_):
        return str(bool(value)).lower()
    if isinstance(value, list | tuple):
        if value and all(isinstance(item, list | tuple) for item in value):  # env_params
            return ", ".join(f"{name} {text(item)}" for name, item in value)
        return " x ".join(map(text, value)) or "none"
    return f"{value:.4g}" if isinstance(value, float | np.floating) else str(value)


def number(value: float) -> str:
    """A return in a few characters: -inf where too many runs diverged, a question mark where it is not known."""
    return "?" if math.isnan(value) else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def quoted(summary: Mapping[str, Any], between: str) -> str:
    """A final return, its interval, and how many runs diverged."""
    final = summary["final_return"]
    parts = [number(final["interquartile_mean"])]
    if np.isfinite(final["interquartile_mean"]) and not np.isnan(final["interval_95"]).any():
        parts.append("[{}, {}]".format(*map(number, final["interval_95"])))
    num_diverged = round(summary["diverged"] * summary["num_seeds"])
    if num_diverged:
        parts.append(f"{num_diverged} of {summary['num_seeds']} diverged")
    return between.join(parts)


def title(env: str, summaries: Summaries) -> str:
    """What was run."""
    seeds = summaries[0]["num_seeds"]
    return f"{env}: {len(summaries)} settings, {seeds} seed{'s' if seeds > 1 else ''}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
