"""What many runs say together: final returns, interquartile means, bootstrap intervals. NumPy arrays in and out."""

import numpy as np
import scipy.stats

from purejaxppo.types import Metrics

FINAL_FRACTION = 0.1


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


def interquartile_mean(values: np.ndarray, axis: int = 0) -> np.ndarray:
    """Mean of the middle half of the runs; NaN where any run is NaN.

    Source: Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical precipice".
    """
    return np.asarray(scipy.stats.trim_mean(values, 0.25, axis=axis), np.float64)


def interval(values: np.ndarray, level: float = 0.95, num_resamples: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    """Bootstrap interval of the interquartile mean over axis 0, by percentiles; NaN for fewer than two runs.

    Args:
      values: [runs, ...].
      level: share of resamples inside.
      num_resamples: resamplings of the runs, always the same ones.

    Returns:
      (low, high), each [...].
    """
    if len(values) < 2:
        return np.full(values.shape[1:], np.nan), np.full(values.shape[1:], np.nan)
    resampled = scipy.stats.bootstrap(
        (values,),
        interquartile_mean,
        confidence_level=level,
        n_resamples=num_resamples,
        batch=100,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return resampled.low, resampled.high


def diverged(metrics: Metrics) -> dict[int, int]:
    """The runs that did not stay finite, and the first update in which each did not; `metrics` leaves are [R, U]."""
    broken = ~np.asarray(metrics.all_finite)
    return {int(run): int(broken[run].argmax()) for run in np.flatnonzero(broken.any(axis=-1))}


def _mean_return(metrics: Metrics, starts: np.ndarray) -> np.ndarray:
    """Mean return of the episodes that ended between one start and the next; [..., len(starts)]."""
    num_episodes = np.asarray(metrics.num_episodes, np.float64)
    totals = np.where(num_episodes > 0, metrics.episode_return * num_episodes, 0.0)
    sums = np.add.reduceat(totals, starts, axis=-1)
    counts = np.add.reduceat(num_episodes, starts, axis=-1)
    return np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
