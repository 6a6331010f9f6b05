"""What many runs say together, from their metrics: returns, and each setting of a sweep compared with the best one.

NumPy arrays in and out. What is missing never vanishes in a mean. A run that diverged counts as the worst there is, a
score of -inf: the interquartile mean bears a quarter of such runs and is -inf beyond. A score that is not known, since
no episode ended, is NaN, and so is what is said of the runs it stands among.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from purejaxppo.estimates import interquartile_mean, interval, probability_of_improvement, stratified_interval
from purejaxppo.types import Metrics

if TYPE_CHECKING:
    from purejaxppo.tokens.types import TokenMetrics

__all__ = [
    "area_under_curve",
    "best",
    "diverged",
    "final_return",
    "interquartile_mean",
    "interval",
    "per_setting",
    "probability_of_improvement",
    "return_curve",
    "steps_to_threshold",
    "stratified_interval",
    "summary",
    "token_summary",
]

FINAL_FRACTION = 0.1  # of the updates, which say how a run ended
SETTINGS_AT_ONCE = 1000  # whose resamples are in memory together


def final_return(metrics: Metrics) -> np.ndarray:
    """Mean return of the episodes that ended in the last tenth of the updates; NaN where none did.

    Args:
      metrics: leaves [..., num_updates].

    Returns:
      [...] float64.
    """
    num_updates = metrics.num_episodes.shape[-1]
    last = max(1, round(num_updates * FINAL_FRACTION))
    return _mean_return(metrics, np.array([num_updates - last]))[..., 0]


def return_curve(metrics: Metrics, max_points: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """The return over training, in at most `max_points` equal pieces of it.

    A point is the mean over the episodes that ended in its piece. Where none did, the last known one stands; before
    the first episode's end it is NaN.

    Args:
      metrics: leaves [..., num_updates].

    Returns:
      (updates done at the end of each piece [P], returns [..., P] float64).
    """
    num_updates = metrics.num_episodes.shape[-1]
    edges = np.linspace(0, num_updates, min(num_updates, max_points) + 1).round().astype(int)
    returns = _mean_return(metrics, edges[:-1])
    for point in range(1, returns.shape[-1]):
        returns[..., point] = np.where(np.isnan(returns[..., point]), returns[..., point - 1], returns[..., point])
    return edges[1:], returns


def area_under_curve(metrics: Metrics) -> np.ndarray:
    """Mean of the return curve over training, in units of return; NaN for a run in which no episode ended.

    The points of `return_curve` weigh by the updates they stand for. Those before the first episode's end are left out,
    since there is no return to put there: the mean is over the training from then on.

    Args:
      metrics: leaves [..., num_updates].

    Returns:
      [...] float64.
    """
    updates, returns = return_curve(metrics)
    known = ~np.isnan(returns)
    weights = known * np.diff(updates, prepend=0)
    total = weights.sum(axis=-1)
    summed = (np.where(known, returns, 0.0) * weights).sum(axis=-1)
    return np.divide(summed, total, out=np.full(total.shape, np.nan), where=total > 0)


def steps_to_threshold(metrics: Metrics, threshold: float, batch_size: int, num_episodes: int = 20) -> np.ndarray:
    """Environment steps until the last `num_episodes` finished episodes first averaged the threshold; inf if never.

    The window is counted in episodes, so that it means the same for every batch size and one lucky episode does not
    reach the threshold. It takes in whole updates, the fewest latest ones in which at least that many episodes ended;
    before so many have ended, nothing counts as reached. Found to within one update, at whose end it stands.

    Args:
      metrics: leaves [..., num_updates].
      threshold: mean return to reach.
      batch_size: environment steps of an update.
      num_episodes: the least number of episodes that are averaged.

    Returns:
      [...] float64.
    """
    totals, counts = _totals(metrics)
    reached = [
        _first_reached(total, count, threshold, num_episodes)
        for total, count in zip(totals.reshape(-1, totals.shape[-1]), counts.reshape(-1, counts.shape[-1]), strict=True)
    ]
    return np.reshape(np.asarray(reached, np.float64), totals.shape[:-1]) * batch_size


def diverged(metrics: Metrics) -> dict[int, int]:
    """The runs that did not stay finite, and the first update in which each did not; `metrics` leaves are [R, U]."""
    broken = ~np.asarray(metrics.all_finite)
    return {int(run): int(broken[run].argmax()) for run in np.flatnonzero(broken.any(axis=-1))}


def per_setting(measure: Callable[[Any], np.ndarray], metrics: Any, num_updates: Sequence[int]) -> np.ndarray:
    """A measure of every run of a sweep, from the updates that its setting has.

    Args:
      measure: of the metrics [num_seeds, num_updates] of one setting, e.g. `final_return`; gives [num_seeds].
      metrics: leaves [num_settings, num_seeds, max_updates].
      num_updates: [num_settings]; what lies beyond is not looked at.

    Returns:
      [num_settings, num_seeds].
    """
    settings = (metrics._make(leaf[index, :, :length] for leaf in metrics) for index, length in enumerate(num_updates))
    return np.array([measure(setting) for setting in settings])


def summary(
    metrics: Metrics, num_updates: Sequence[int], batch_size: Sequence[int], threshold: float | None = None
) -> list[dict[str, Any]]:
    """The numbers to quote of each setting of a sweep, and how it compares with the best one, `best`.

    A run that diverged counts as the worst in every number: return and area -inf, the threshold never reached. So the
    interquartile mean is -inf once more than a quarter of the runs diverged. Returns of different environments cannot
    be compared: summarise each on its own. And the best of many settings was also the luckiest: its interval does not
    know that it was chosen, and a close second may be as good.

    Args:
      metrics: leaves [num_settings, num_seeds, max_updates].
      num_updates: [num_settings], updates that a setting has; what lies beyond is not looked at.
      batch_size: [num_settings], environment steps of an update.
      threshold: return whose first reaching is timed, if given.

    Returns:
      One dictionary a setting, of plain numbers:
        num_seeds: int.
        final_return, area_under_curve: {"interquartile_mean": float, "interval_95": [low, high]} over the seeds.
        improvement_over_best: {"probability": float, "interval_95": [low, high]}, of a higher final return than the
          best setting's with the same seed; 0.5 for the best itself.
        steps_to_threshold: {"threshold": float, "median": float, "share": float}, the median over all seeds, so inf
          unless more than half reached it, and the share that did; only with a threshold.
        diverged: share of runs that did not stay finite.
        unknown: share of the others in whose last tenth no episode ended; with any, the final return is NaN.
    """
    broken = per_setting(_broken, metrics, num_updates)
    returns = np.where(broken, -np.inf, per_setting(final_return, metrics, num_updates))
    areas = np.where(broken, -np.inf, per_setting(area_under_curve, metrics, num_updates))
    columns: dict[str, Sequence[Any]] = {
        "num_seeds": [broken.shape[1]] * len(broken),
        "final_return": _estimates(returns, _interquartile, "interquartile_mean"),
        "area_under_curve": _estimates(areas, _interquartile, "interquartile_mean"),
        "diverged": broken.mean(axis=1).tolist(),
        "unknown": np.isnan(returns).mean(axis=1).tolist(),
    }
    first = returns[_best(columns["final_return"])][:, None]
    columns["improvement_over_best"] = _estimates(
        returns, lambda runs: probability_of_improvement(runs, first), "probability"
    )
    if threshold is not None:
        updates = per_setting(lambda setting: steps_to_threshold(setting, threshold, 1), metrics, num_updates)
        steps = np.where(broken, np.inf, updates * np.asarray(batch_size)[:, None])
        columns["steps_to_threshold"] = [
            {"threshold": threshold, "median": float(np.median(runs)), "share": float(np.isfinite(runs).mean())}
            for runs in steps
        ]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def token_summary(metrics: "TokenMetrics", num_updates: Sequence[int]) -> list[dict[str, Any]]:
    """The numbers to quote of each setting of a sweep on token sequences. A run that diverged counts as the worst.

    Args:
      metrics: leaves [num_settings, num_seeds, max_updates].
      num_updates: [num_settings], updates that a setting has; what lies beyond is not looked at.

    Returns:
      One dictionary a setting, of plain numbers:
        num_seeds: int.
        objective, score, gold, ref_kl, accuracy: {"interquartile_mean": float, "interval_95": [low, high]} over the
          seeds, of means over the last tenth of the updates. NaN for what the algorithm does not know, as DPO, which
          draws no responses, does not know its score.
        diverged: share of runs that did not stay finite.
    """
    broken = per_setting(_broken, metrics, num_updates)
    columns: dict[str, Sequence[Any]] = {
        "num_seeds": [broken.shape[1]] * len(broken),
        "diverged": broken.mean(axis=1).tolist(),
    }
    for name, measure in TOKEN_MEASURES.items():
        worst = np.inf if name == "ref_kl" else -np.inf
        values = np.where(broken, worst, per_setting(measure, metrics, num_updates))
        columns[name] = _estimates(values, _interquartile, "interquartile_mean")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def best(summaries: Sequence[dict[str, Any]], by: str = "final_return") -> int:
    """The setting of the highest interquartile mean of an estimate; the first of equals, and of the unknown."""
    return _best([row[by] for row in summaries])


def _final(name: str) -> Callable[["TokenMetrics"], np.ndarray]:
    """A metric's mean over the last tenth of the updates."""
    return lambda metrics: _mean_at_the_end(getattr(metrics, name))


def _final_objective(metrics: "TokenMetrics") -> np.ndarray:
    """Score less what the KL to the reference costs."""
    return _mean_at_the_end(metrics.score - metrics.kl_coef * metrics.ref_kl)


def _mean_at_the_end(values: Any) -> np.ndarray:
    last = max(1, round(values.shape[-1] * FINAL_FRACTION))
    return np.asarray(values[..., -last:], np.float64).mean(axis=-1)


# What is said of a run in one number.
MEASURES: dict[str, Callable[[Metrics], np.ndarray]] = {
    "final_return": final_return,
    "area_under_curve": area_under_curve,
}
TOKEN_MEASURES: dict[str, Callable[["TokenMetrics"], np.ndarray]] = {
    "objective": _final_objective,
    **{name: _final(name) for name in ("score", "gold", "ref_kl", "accuracy")},
}


def _best(final_returns: Sequence[dict[str, Any]]) -> int:
    means = np.array([final["interquartile_mean"] for final in final_returns])
    return int(np.argmax(means)) if np.isnan(means).all() else int(np.nanargmax(means))


def _estimates(
    values: np.ndarray, estimate: Callable[[np.ndarray], tuple[np.ndarray, Any]], name: str
) -> list[dict[str, Any]]:
    """An estimate and its interval for each setting of values [num_settings, num_seeds], in blocks of settings."""
    rows: list[dict[str, Any]] = []
    for start in range(0, len(values), SETTINGS_AT_ONCE):
        middle, (low, high) = estimate(values[start : start + SETTINGS_AT_ONCE].T)
        rows += [
            {name: numbers[0], "interval_95": numbers[1:]} for numbers in np.stack([middle, low, high], axis=1).tolist()
        ]
    return rows


def _broken(metrics: Any) -> np.ndarray:
    """Whether each run did not stay finite."""
    return np.asarray(np.logical_not(metrics.all_finite).any(axis=-1))


def _interquartile(values: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    return interquartile_mean(values), interval(values)


def _first_reached(totals: np.ndarray, counts: np.ndarray, threshold: float, num_episodes: int) -> float:
    """Updates of one run after which its latest `num_episodes` episodes, or a few more, average the threshold."""
    ended, summed = np.append(0.0, counts.cumsum()), np.append(0.0, totals.cumsum())
    ends = np.flatnonzero(ended >= num_episodes)
    starts = np.searchsorted(ended, ended[ends] - num_episodes, side="right") - 1
    reached = summed[ends] - summed[starts] >= threshold * (ended[ends] - ended[starts])
    return float(ends[reached.argmax()]) if reached.any() else np.inf


def _totals(metrics: Metrics) -> tuple[np.ndarray, np.ndarray]:
    """Summed returns and number of the episodes that ended in each update, [..., num_updates] float64."""
    num_episodes = np.asarray(metrics.num_episodes, np.float64)
    return np.where(num_episodes > 0, metrics.episode_return * num_episodes, 0.0), num_episodes


def _mean_return(metrics: Metrics, starts: np.ndarray) -> np.ndarray:
    """Mean return of the episodes that ended between one start and the next; [..., len(starts)]."""
    totals, num_episodes = _totals(metrics)
    sums = np.add.reduceat(totals, starts, axis=-1)
    counts = np.add.reduceat(num_episodes, starts, axis=-1)
    return np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
