"""Statistics over runs and over the settings of a sweep, against numbers worked out by hand."""

import warnings

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


def test_diverged_names_runs_and_first_updates():
    finite = [[True, True, True], [True, False, False], [False, False, False]]
    assert results.diverged(metrics(np.zeros((3, 3)), np.ones((3, 3)), finite)) == {1: 1, 2: 0}


def test_area_under_curve_is_the_mean_return_over_training():
    areas = results.area_under_curve(metrics([[0.0, 100.0, 200.0, 300.0]], np.ones((1, 4))))
    np.testing.assert_allclose(areas, [150.0])


def test_area_under_curve_starts_with_the_first_episode_and_carries_forward():
    returns = [[np.nan, 100.0, np.nan, 400.0], [np.nan] * 4]
    np.testing.assert_allclose(results.area_under_curve(metrics(returns, np.isfinite(returns))), [200.0, np.nan])


def test_area_under_curve_weighs_pieces_of_unequal_length():
    returns = np.random.default_rng(0).normal(size=(3, 150))  # 100 points, half of them of two updates
    runs = metrics(returns, np.ones(returns.shape))
    np.testing.assert_allclose(results.area_under_curve(runs), returns.mean(axis=1), rtol=1e-5)
    assert (np.abs(np.mean(results.return_curve(runs)[1], axis=1) - returns.mean(axis=1)) > 1e-3).all()


def test_steps_to_threshold_by_hand():
    returns = [
        [1.0, 1.0, 9.0, 9.0, 9.0],  # the last four episodes average 1, then (1 + 9) / 2, then 9
        [1.0, 80.0, 1.0, 1.0, 1.0],  # a lucky one: the window is the 11 episodes of two updates, (10 + 80) / 11
        [1.0, 99.0, 1.0, 1.0, 1.0],  # (10 + 99) / 11
        [9.0, np.nan, np.nan, 9.0, 9.0],  # too few episodes until the fourth update
        [np.nan] * 5,
    ]
    counts = [[2, 2, 2, 2, 2], [10, 1, 10, 10, 10], [10, 1, 10, 10, 10], [2, 0, 0, 2, 2], [0] * 5]
    steps = results.steps_to_threshold(metrics(returns, counts), threshold=9.0, batch_size=512, num_episodes=4)
    np.testing.assert_array_equal(steps, [4 * 512, np.inf, 2 * 512, 4 * 512, np.inf])


def test_steps_to_threshold_of_scattered_episodes_agrees_with_a_loop():
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 4, (40, 60))
    returns = np.where(counts > 0, rng.normal(np.linspace(0, 3, 60), 2.0, (40, 60)), np.nan)
    for k in (1, 5, 20):
        steps = results.steps_to_threshold(metrics(returns, counts), 2.0, batch_size=8, num_episodes=k)
        assert np.isfinite(steps).any()
        for run in range(40):
            assert steps[run] == slow_steps(np.float32(returns[run]), counts[run], 2.0, k) * 8


def slow_steps(returns, counts, threshold, k):
    """Update by update, backwards until k episodes are together."""
    for end in range(1, len(counts) + 1):
        for start in range(end - 1, -1, -1):
            window = slice(start, end)
            if counts[window].sum() >= k:
                if np.nansum(returns[window] * counts[window]) / counts[window].sum() >= threshold:
                    return end
                break
    return np.inf


def test_steps_to_threshold_keeps_leading_axes():
    runs = metrics(np.full((2, 3, 5), 7.0), np.full((2, 3, 5), 30))
    np.testing.assert_array_equal(results.steps_to_threshold(runs, 7.0, 10), np.full((2, 3), 10.0))


def sweep_metrics():
    """Two settings of 8 seeds, one with 20 updates, one with 10 and rubbish beyond; one episode an update."""
    returns = np.full((2, 8, 20), 1e6)
    returns[0] = np.arange(8.0)[:, None]  # seed j returns j, always
    returns[1, :, :10] = np.arange(8.0)[:, None] + np.where(np.arange(8) == 0, -1.0, 2.0)[:, None]
    finite = np.ones((2, 8, 20), bool)
    finite[1, :, 10:] = False
    return metrics(returns, np.ones((2, 8, 20)), finite)


def test_summary_by_hand():
    first, second = results.summary(sweep_metrics(), [20, 10], [100, 200], threshold=3.0)
    assert (first["num_seeds"], first["diverged"], first["unknown"]) == (8, 0.0, 0.0)
    assert first["final_return"]["interquartile_mean"] == pytest.approx((2 + 3 + 4 + 5) / 4)
    assert second["final_return"]["interquartile_mean"] == pytest.approx((4 + 5 + 6 + 7) / 4)
    assert second["area_under_curve"] == second["final_return"]  # as every curve is flat
    assert second["diverged"] == 0.0  # beyond its ten updates nothing is looked at
    assert results.best([first, second]) == 1
    low, high = results.interval(np.arange(8.0))
    assert first["final_return"]["interval_95"] == pytest.approx([low, high])
    # Seed 0 is better in the first setting, the seven others in the second.
    assert first["improvement_over_best"]["probability"] == pytest.approx(1 / 8)
    assert second["improvement_over_best"] == {"probability": 0.5, "interval_95": [0.5, 0.5]}


def test_summary_times_the_threshold_in_environment_steps():
    # Twenty episodes have ended after 20 updates in the first setting; never in the second, which has ten updates.
    first, second = results.summary(sweep_metrics(), [20, 10], [100, 200], threshold=3.0)
    assert first["steps_to_threshold"] == {"threshold": 3.0, "median": 2000.0, "share": 5 / 8}
    assert second["steps_to_threshold"] == {"threshold": 3.0, "median": np.inf, "share": 0.0}
    same = metrics(np.full((2, 8, 30), 5.0), np.ones((2, 8, 30)))
    medians = [
        row["steps_to_threshold"]["median"] for row in results.summary(same, [30, 30], [100, 200], threshold=5.0)
    ]
    assert medians == [2000.0, 4000.0]
    assert "steps_to_threshold" not in results.summary(sweep_metrics(), [20, 10], [100, 200])[0]


def broken_runs(num_broken):
    """One setting of 8 seeds that return 0 to 7, and the first `num_broken` of the *best* are not finite at the end."""
    finite = np.ones((1, 8, 20), bool)
    finite[0, 8 - num_broken :, -1] = False
    returns = np.broadcast_to(np.arange(8.0)[None, :, None], (1, 8, 20))
    (row,) = results.summary(metrics(returns, np.ones((1, 8, 20)), finite), [20], [10], threshold=0.0)
    return row


def test_diverged_runs_count_as_the_worst():
    row = broken_runs(2)
    assert row["diverged"] == 0.25
    assert row["final_return"]["interquartile_mean"] == pytest.approx((0 + 1 + 2 + 3) / 4)  # the middle of six and two
    assert row["final_return"]["interval_95"][0] == -np.inf  # of resamples many have more than two of them
    assert row["steps_to_threshold"]["share"] == 0.75
    for num_broken in (3, 8):
        row = broken_runs(num_broken)
        assert row["final_return"]["interquartile_mean"] == -np.inf
        assert row["area_under_curve"]["interquartile_mean"] == -np.inf


def test_a_run_without_late_episodes_is_unknown_not_bad():
    counts = np.ones((2, 4, 20))
    counts[1, 0, 10:] = 0
    known, unknown = results.summary(metrics(np.full((2, 4, 20), 5.0), counts), [20, 20], [10, 10])
    assert (known["unknown"], unknown["unknown"]) == (0.0, 0.25)
    assert np.isnan(unknown["final_return"]["interquartile_mean"])
    assert np.isnan(unknown["improvement_over_best"]["probability"])
    assert unknown["area_under_curve"]["interquartile_mean"] == 5.0
    assert results.best([unknown, known]) == 1
    assert results.best([unknown, unknown]) == 0


def test_summary_of_one_seed_and_of_nothing_but_diverged_runs_warns_of_nothing():
    finite = np.stack([np.ones((3, 20), bool), np.zeros((3, 20), bool)])
    runs = metrics(np.full((2, 3, 20), 5.0), np.ones((2, 3, 20)), finite)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        good, bad = results.summary(runs, [20, 20], [10, 10], threshold=5.0)
        assert bad["final_return"] == {"interquartile_mean": -np.inf, "interval_95": [-np.inf, -np.inf]}
        assert bad["improvement_over_best"]["probability"] == 0.0
        assert good["final_return"] == {"interquartile_mean": 5.0, "interval_95": [5.0, 5.0]}
        (single,) = results.summary(metrics(np.full((1, 1, 20), 5.0), np.ones((1, 1, 20))), [20], [10])
    assert single["final_return"]["interquartile_mean"] == 5.0
    assert np.isnan(single["final_return"]["interval_95"]).all()


def test_blocks_of_settings_change_no_number(monkeypatch):
    rng = np.random.default_rng(2)
    runs = metrics(rng.normal(size=(5, 6, 20)), np.ones((5, 6, 20)))
    whole = results.summary(runs, [20] * 5, [10] * 5)
    monkeypatch.setattr(results, "SETTINGS_AT_ONCE", 2)
    assert results.summary(runs, [20] * 5, [10] * 5) == whole
