"""`purejaxppo bandit`: what it prints and writes, and the text's figures from 10,000 seeds."""

import json
import math

import numpy as np
import pytest

from purejaxppo.host import bandit, bandit_facts, bandit_plots
from purejaxppo.host.bandit_facts import Row


def row(low, high, rounding, ours, interval):
    return Row("8", "something", "text", low, high, rounding, ours, interval)


@pytest.mark.parametrize(
    ("case", "agrees"),
    [
        (row(0.3, 0.3, 0.0, 0.28, (0.25, 0.31)), "yes"),
        (row(0.3, 0.3, 0.05, 0.2, (0.15, 0.26)), "rounded"),
        (row(0.3, 0.3, 0.0, 0.2, (0.15, 0.26)), "no"),
        (row(6, 7, 0.0, 8, (7, 9)), "yes"),
        (row(0, math.inf, 0.0, 0.1, (0.05, 0.15)), "yes"),
        (row(0, math.inf, 0.0, 0.1, (-0.05, 0.25)), "no"),
        (row(0.53, 0.53, 0.005, 0.5333, None), "yes"),
        (row(0.53, 0.53, 0.005, 0.54, None), "no"),
        (row(1, 1, 0.0, math.nan, (math.nan, math.nan)), "no"),
    ],
)
def test_agreement(case, agrees):
    assert case.agrees == agrees


def test_interval_is_that_of_300_runs_whatever_the_number():
    generator = np.random.default_rng(0)
    for number in (300, 20_000):
        low, high = bandit_facts.interval(generator.random(number) < 1 / 3, bandit_facts.mean, seed=0)
        assert high - low == pytest.approx(2 * 1.96 * math.sqrt(2 / 9 / 300), rel=0.12)


def test_statistics_by_hand():
    nan = math.nan
    np.testing.assert_array_equal(bandit_facts.mean(np.array([[1.0, nan, 3.0], [nan, nan, nan]])), [2.0, nan])
    np.testing.assert_array_equal(bandit_facts.median(np.array([[1.0, nan, 4.0], [nan, nan, nan]])), [2.5, nan])
    one = np.array([[[0.5, 0.8, 0.8, 0.8], [0.5, 0.6, 0.9, 0.9]], [[0.5, 0.8, 0.8, 0.8], [0.5, 0.6, 0.7, 0.8]]])
    np.testing.assert_array_equal(bandit_facts.overtaking(one[:, None]), [2, 4])


@pytest.mark.slow
def test_command_writes_everything_and_repeats_itself(tmp_path, capsys):
    assert bandit.run_bandit(num_seeds=5, seed=3, out=tmp_path / "a") == 0
    printed = capsys.readouterr().out
    assert "from 5 seeds" in printed
    assert max(len(line) for line in printed.splitlines()) <= 80
    assert bandit.run_bandit(num_seeds=5, seed=3, out=tmp_path / "b") == 0
    first, second = ((tmp_path / name / "bandit.json").read_text() for name in "ab")
    assert first == second
    report = json.loads(first)
    assert report["num_seeds"] == 5
    assert {figure["fact"] for figure in report["figures"]} == {"8", "9", "10", "11", "12"}
    assert len(report["curves"]["no clip"]["expected_reward"]["mean"]) == 21
    for name in ("bandit.png", "clip.png"):
        assert (tmp_path / "a" / name).stat().st_size > 20_000


def test_map_covers_the_settings(tmp_path, monkeypatch):
    axes = {"num_epochs": (1, 3), "num_pulls": (1, 4), "clip_eps": (0.2, math.inf)}
    monkeypatch.setattr(bandit, "MAP_AXES", axes)
    cells = bandit.map_settings(0, num_seeds=40, num_iterations=2)
    assert set(cells) == {f"{name}{end}" for name in ("wrong_arm", "expected_reward") for end in ("", "_low", "_high")}
    assert all(value.shape == (2, 2, 2) for value in cells.values())
    np.testing.assert_array_equal(cells["wrong_arm"][:, 0], 0)
    np.testing.assert_array_equal(cells["expected_reward"][0, :, 0], cells["expected_reward"][0, :, 1])
    assert (cells["wrong_arm_low"] <= cells["wrong_arm"]).all()
    bandit_plots.save_map(tmp_path / "map.png", cells, axes, 40)
    assert (tmp_path / "map.png").stat().st_size > 10_000


def test_widest_interval_of_a_cell_is_under_two_points():
    low, high = bandit_plots.wilson(np.array([bandit.MAP_SEEDS // 2]), bandit.MAP_SEEDS)
    assert high - low < 0.02


def test_bad_number_of_seeds_writes_nothing(tmp_path):
    with pytest.raises(ValueError, match="num_seeds = 0: must be a positive integer"):
        bandit.run_bandit(num_seeds=0, out=tmp_path / "never")
    assert not (tmp_path / "never").exists()


@pytest.mark.slow
def test_figures_of_the_text_from_10_000_seeds():
    """All agree but one: a wrong arm is not for ever. Its share of the runs is, and half of them change places."""
    rows = bandit_facts.compare(bandit_facts.run_experiments(10_000, 0), 0)
    agree = {row.what: row.agrees for row in rows}
    surprise = "of those, still wrong after 200"
    assert agree.pop(surprise) == "no"
    only_rounded = {what for what, answer in agree.items() if answer == "rounded"}
    assert only_rounded == {
        "N=64: entropy after 2, median",
        "K=100, eps 0.05: mean KL",
        "K=40, eps 0.05: mean KL",
    }
    assert set(agree.values()) == {"yes", "rounded"}
