"""Interquartile means, bootstrap intervals and comparisons, against other ways to the same number."""

import warnings

import numpy as np
import pytest
import scipy.stats

from purejaxppo import results

NAN, INF = np.nan, np.inf

# Final returns of a made-up experiment, [tasks, runs]: skewed, with ties and a failed run.
SCORES = np.array(
    [
        [0.91, 0.87, 0.87, 0.12, 0.95, 0.66, 0.79, 0.83, 0.90, 0.41, 0.88, 0.93],
        [1.40, 1.10, 0.20, 1.70, 1.52, 1.33, 1.05, 1.61, 0.98, 1.44, 1.29, 1.38],
        [0.05, 0.11, 0.02, 0.31, 0.08, 0.07, 0.25, 0.16, 0.09, 0.13, 0.04, -0.9],
    ]
)


def slow_interquartile_mean(values):
    """Sort, cut a whole number of runs at each end, average."""
    ordered, cut = sorted(values), len(values) // 4
    kept = ordered[cut : len(ordered) - cut]
    return sum(kept) / len(kept)


def slow_bounds(strata, num_resamples, seed):
    """Percentiles of the interquartile mean of runs drawn anew, stratum by stratum."""
    rng = np.random.default_rng(seed)
    draws = [
        slow_interquartile_mean(np.concatenate([rng.choice(runs, len(runs)) for runs in strata]))
        for _ in range(num_resamples)
    ]
    return np.percentile(draws, (2.5, 97.5))


def test_interquartile_mean_drops_a_quarter_at_each_end():
    values = np.array([1000.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, -1000.0])
    assert results.interquartile_mean(values) == pytest.approx((2 + 3 + 4 + 5) / 4)


@pytest.mark.parametrize("num_runs", [1, 2, 3, 4, 5, 7, 10, 11, 12])
def test_interquartile_mean_agrees_with_sorting(num_runs):
    for runs in SCORES[:, :num_runs]:
        assert results.interquartile_mean(runs) == pytest.approx(slow_interquartile_mean(runs))
    np.testing.assert_allclose(
        results.interquartile_mean(SCORES, axis=1), [slow_interquartile_mean(runs) for runs in SCORES]
    )


def test_interquartile_mean_bears_a_quarter_of_runs_without_bottom():
    assert results.interquartile_mean(np.array([-INF, -INF, 1, 2, 3, 4, 5, 6.0])) == pytest.approx(2.5)
    assert results.interquartile_mean(np.array([-INF, -INF, -INF, 2, 3, 4, 5, 6.0])) == -INF
    assert np.isnan(results.interquartile_mean(np.array([NAN, 1, 2, 3, 4, 5, 6, 7.0])))


def test_interval_is_the_percentiles_of_the_same_resamples():
    runs, rng = SCORES[0], np.random.default_rng(0)
    draws = [
        slow_interquartile_mean(runs[chosen]) for _ in range(4) for chosen in rng.integers(0, len(runs), (100, 12))
    ]
    np.testing.assert_allclose(results.interval(runs, num_resamples=400), np.percentile(draws, (2.5, 97.5)), rtol=1e-12)


def test_interval_agrees_with_other_resamples():
    for runs in SCORES:
        spread = np.ptp(results.interval(runs))
        np.testing.assert_allclose(results.interval(runs), slow_bounds([runs], 4000, seed=1), atol=0.06 * spread)


def test_the_pooled_interval_resamples_within_each_task():
    """The published definition: runs drawn anew task by task, the trimmed mean of all runs of all tasks."""
    rng = np.random.default_rng(3)
    chosen = rng.integers(0, 12, (20_000, 3, 12))
    draws = scipy.stats.trim_mean(np.take_along_axis(SCORES[None], chosen, axis=2).reshape(20_000, -1), 0.25, axis=1)
    expected = np.percentile(draws, (2.5, 97.5))
    low, high = results.stratified_interval(SCORES, num_resamples=20_000)
    np.testing.assert_allclose((low, high), expected, atol=0.02 * np.ptp(expected))
    assert low < results.interquartile_mean(SCORES.ravel()) < high
    unstratified = results.interval(SCORES.ravel(), num_resamples=2000)
    assert np.ptp(unstratified) > 1.5 * np.ptp(expected)  # so that the test above can tell them apart


def test_strata_may_differ_in_runs_and_carry_more_axes():
    strata = [np.stack([SCORES[0], SCORES[1]], axis=1), np.stack([SCORES[1], SCORES[2]], axis=1)[:7]]
    low, high = results.stratified_interval(strata)
    assert low.shape == high.shape == (2,)
    alone = results.stratified_interval([runs[:, 1] for runs in strata])
    np.testing.assert_array_equal((low[1], high[1]), alone)


def test_one_stratum_is_the_plain_interval():
    np.testing.assert_array_equal(results.stratified_interval(SCORES[:1]), results.interval(SCORES[0]))


def test_the_interval_of_another_statistic():
    low, high = results.stratified_interval([SCORES[0]], np.mean)
    assert low < SCORES[0].mean() < high
    assert high < results.interval(SCORES[0])[1]  # the failed run pulls at the mean


def test_interval_covers_the_true_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    samples = rng.normal(3.0, 2.0, size=(24, 300))  # 300 experiments of 24 runs
    low, high = results.interval(samples, num_resamples=400)
    covered = np.mean((low <= 3.0) & (high >= 3.0))
    assert 0.88 <= covered <= 0.98


def test_interval_of_one_run_is_unknown():
    low, high = results.interval(np.array([5.0]))
    assert np.isnan(low)
    assert np.isnan(high)
    assert np.isnan(results.stratified_interval([SCORES[0], SCORES[1][:1]])).all()


def test_interval_of_runs_without_bottom_and_of_unknown_ones():
    runs = np.tile(SCORES[0][:, None], 3)
    runs[:6, 0] = -INF
    runs[:1, 1] = -INF
    runs[0, 2] = NAN
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        low, high = results.interval(runs)
    np.testing.assert_array_equal(low == -INF, [True, False, False])
    np.testing.assert_array_equal(np.isnan(low), [False, False, True])
    np.testing.assert_array_equal(np.isnan(high), [False, False, True])


def test_a_percentile_between_resamples_without_bottom_is_not_unknown():
    for num_resamples in (2, 3, 41, 2000):  # percentiles on a resample, and between two
        low, high = results.interval(np.array([-INF, -INF, -INF, -INF]), num_resamples=num_resamples)
        assert low == high == -INF


def test_probability_of_improvement_by_hand():
    x, y = np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.0, 2.0, 5.0, 3.0])
    probability, (low, high) = results.probability_of_improvement(x, y)
    assert probability == (1 + 0.5 + 0 + 1) / 4
    assert low < probability < high
    assert results.probability_of_improvement(y, x)[0] == 1 - probability


def test_probability_of_improvement_is_paired_by_seed():
    """Each seed is a little better: certain in pairs, near a half over all pairs of runs."""
    x = np.arange(20.0)
    assert results.probability_of_improvement(x + 0.1, x)[0] == 1.0
    assert (x[:, None] + 0.1 > x).mean() == pytest.approx(0.525)


def test_probability_of_improvement_resamples_the_seeds():
    x, y = np.arange(40.0), np.where(np.arange(40) < 10, np.inf, -1.0)
    probability, bounds = results.probability_of_improvement(x, y)
    assert probability == 0.75
    share = scipy.stats.binom(40, 0.75)
    np.testing.assert_allclose(bounds, [share.ppf(0.025) / 40, share.ppf(0.975) / 40], atol=1 / 40)


def test_probability_of_improvement_of_diverged_unknown_and_single_runs():
    assert results.probability_of_improvement(np.array([-INF, 1.0]), np.array([-INF, -INF]))[0] == 0.75
    probability, bounds = results.probability_of_improvement(np.array([NAN, 1.0]), np.array([0.0, 0.0]))
    assert np.isnan([probability, *bounds]).all()
    probability, bounds = results.probability_of_improvement(np.array([1.0]), np.array([0.0]))
    assert probability == 1.0
    assert np.isnan(bounds).all()


def test_probability_of_improvement_of_many_settings_at_once():
    x, y = SCORES.T, SCORES[0][:, None]
    probabilities, (low, high) = results.probability_of_improvement(x, y)
    for setting in range(3):
        alone, bounds = results.probability_of_improvement(x[:, setting], SCORES[0])
        np.testing.assert_array_equal((probabilities[setting], low[setting], high[setting]), (alone, *bounds))
