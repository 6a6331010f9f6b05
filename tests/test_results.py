"""Statistics over runs, against numbers worked out by hand."""

import numpy as np
import pytest

from purejaxppo import results
from purejaxppo.types import Metrics


def metrics(episode_return, num_episodes, all_finite=None):
    """Metrics of which only what the statistics read is given."""
    episode_return = np.asarray(episode_return, np.float32)
    fields = dict.fromkeys(Metrics._fields, np.zeros_like(episode_return))
    fields["episode_return"] = episode_return
    fields["num_episodes"] = np.asarray(num_episodes, np.int32)
    fields["all_finite"] = np.ones_like(episode_return, bool) if all_finite is None else np.asarray(all_finite)
    return Metrics(**fields)


def test_final_return_weighs_the_last_tenth_by_episodes():
    returns = [[0.0] * 18 + [10.0, 40.0], [0.0] * 18 + [np.nan, 7.0]]
    counts = [[5] * 18 + [1, 2], [5] * 18 + [0, 3]]
    np.testing.assert_allclose(results.final_return(metrics(returns, counts)), [(10 + 80) / 3, 7.0])


def test_final_return_is_unknown_not_zero_without_episodes():
    assert np.isnan(results.final_return(metrics([[3.0, np.nan]], [[4, 0]]))).all()


def test_return_curve_carries_the_last_known_return_forward():
    returns = [[np.nan, 2.0, np.nan, 6.0]]
    updates, curve = results.return_curve(metrics(returns, [[0, 1, 0, 2]]), max_points=4)
    np.testing.assert_array_equal(updates, [1, 2, 3, 4])
    np.testing.assert_array_equal(curve, [[np.nan, 2.0, 2.0, 6.0]])


def test_return_curve_pools_updates_by_episodes():
    updates, curve = results.return_curve(metrics([[1.0, 4.0, 10.0, 20.0]], [[2, 1, 1, 1]]), max_points=2)
    np.testing.assert_array_equal(updates, [2, 4])
    np.testing.assert_allclose(curve, [[(1 + 1 + 4) / 3, 15.0]])


def test_interquartile_mean_drops_a_quarter_at_each_end():
    values = np.array([1000.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, -1000.0])
    assert results.interquartile_mean(values) == pytest.approx((2 + 3 + 4 + 5) / 4)


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


def test_diverged_names_runs_and_first_updates():
    finite = [[True, True, True], [True, False, False], [False, False, False]]
    assert results.diverged(metrics(np.zeros((3, 3)), np.ones((3, 3)), finite)) == {1: 1, 2: 0}
