"""Estimates from few independent runs: interquartile means, bootstrap intervals, comparisons seed by seed.

Of arrays of scores, whatever was scored. A score of -inf is one worse than any other; NaN is one that is not known.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy  # loads scipy.stats at its first use, which nothing should wait for before


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
    return stratified_interval([values], level=level, num_resamples=num_resamples)


def stratified_interval(
    strata: Sequence[np.ndarray] | np.ndarray,
    statistic: Callable[..., Any] = interquartile_mean,
    level: float = 0.95,
    num_resamples: int = 2000,
) -> tuple[np.ndarray, np.ndarray]:
    """Bootstrap interval, by percentiles, of a statistic of several settings' or environments' runs pooled.

    The runs of each stratum are resampled among themselves, so that each keeps its weight, and the statistic is taken
    of all of them together: beside `interquartile_mean(np.concatenate(strata))` it is the interval of an aggregate over
    tasks. With one stratum it is the plain bootstrap.

    Args:
      strata: arrays [runs of the stratum, ...]; one array [strata, runs, ...] will do.
      statistic: of values and `axis`.
      level: share of resamples inside.
      num_resamples: resamplings of the runs, always the same ones.

    Returns:
      (low, high), each [...]; NaN where a run is NaN, and everywhere if a stratum has fewer than two runs.

    Source: Agarwal et al. 2021, section 4.1.
    """
    shape = strata[0].shape[1:]
    if min(map(len, strata)) < 2:
        return np.full(shape, np.nan), np.full(shape, np.nan)
    known = ~np.any([np.isnan(values).any(axis=0) for values in strata], axis=0)
    with np.errstate(invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", scipy.stats.DegenerateDataWarning)  # said of every NaN
        low, high = scipy.stats.bootstrap(
            tuple(strata),
            lambda *samples, axis: statistic(np.concatenate(samples, axis), axis=axis),
            confidence_level=level,
            n_resamples=num_resamples,
            batch=100,
            method="percentile",
            rng=np.random.default_rng(0),
        ).confidence_interval
    return _bound(low, known), _bound(high, known)


def probability_of_improvement(
    x: np.ndarray, y: np.ndarray, level: float = 0.95, num_resamples: int = 2000
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """P(x > y) + P(x = y) / 2 over pairs of one seed, and its bootstrap interval over the seeds.

    Equal seeds of two settings draw the same random numbers, so run j is compared with run j alone; the usual estimate,
    over all pairs of runs, does not use that. Two runs that both diverged are a tie. NaN where any run is NaN. Where
    all n seeds say the same, the bootstrap interval has no width. That is no certainty: probabilities up to about 3 / n
    away agree with such seeds just as well.

    Args:
      x: scores [num_seeds, ...].
      y: scores that broadcast with them.
      level: share of resamples inside.
      num_resamples: resamplings of the seeds, always the same ones.

    Returns:
      (probability [...], (low, high)).

    Source: Agarwal et al. 2021, section 4.3, there unpaired.
    """
    wins = np.where(np.isnan(x) | np.isnan(y), np.nan, (x > y) + 0.5 * (x == y))
    return wins.mean(axis=0), stratified_interval([wins], np.mean, level, num_resamples)


def _bound(bound: np.ndarray, known: np.ndarray) -> np.ndarray:
    """A percentile that falls between resamples of -inf is interpolated to NaN; it is -inf."""
    return np.where(known & np.isnan(bound), -np.inf, bound)[()]
