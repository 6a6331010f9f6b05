"""`purejaxppo lab`: what its measures say of made-up runs, how they are judged, and a short laboratory as a whole."""

import dataclasses
import json
import math

import numpy as np
import pytest

from purejaxppo.config import check_hparams
from purejaxppo.host import lab
from purejaxppo.types import Metrics

NAN, INF = math.nan, math.inf
FIELDS = {"num_episodes": np.int32, "num_epochs": np.int32, "all_finite": bool}


def metrics(returns, **fields):
    """Metrics of runs with these returns [num_seeds, num_updates]; one episode an update, none where NaN."""
    returns = np.asarray(returns, np.float32)
    base = {name: np.ones(returns.shape, FIELDS.get(name, np.float32)) for name in Metrics._fields}
    base |= {"episode_return": returns, "num_episodes": np.isfinite(returns).astype(np.int32)}
    return Metrics(**base | {name: np.asarray(value, np.float32) for name, value in fields.items()})


def test_steps_to_the_ceiling_end_with_the_first_five_updates_near_it():
    runs = metrics(
        [
            [500, 500, 500, 500, 500, 20, 20],
            [20, 500, 500, 500, 500, 376, 500],  # 475.2 on average, from the second update on
            [500, 500, 500, 500, 374, 500, 20],  # 474.8
            [NAN, NAN, 500, NAN, NAN, 500, 500],  # the last known return stands
        ]
    )
    np.testing.assert_array_equal(lab.steps_to_ceiling(runs), [5 * 512, 6 * 512, INF, 7 * 512])


def test_the_largest_fall_is_from_the_best_so_far():
    runs = metrics([[10, 400, 300, 450, 20], [10, 20, 30, 40, 50], [500, 100, 400, 0, 0], [NAN, 300, NAN, 200, 250]])
    np.testing.assert_allclose(lab.largest_fall(runs), [430, 0, 500, 100])


def test_the_late_spread_is_of_the_last_quarter():
    late = np.array([100, 300], np.float32)
    runs = metrics([[0, 500, 0, 500, 0, 500, *late], [0, 0, 0, 0, 0, 0, 7, 7]])
    np.testing.assert_allclose(lab.late_spread(runs), [100, 0])


def test_entropies():
    runs = metrics(np.zeros((2, 3)), entropy=[[0.6, 0.1, 0.3], [0.2, 0.5, 0.4]])
    np.testing.assert_allclose(lab.first_entropy(runs), [0.6, 0.2])
    np.testing.assert_allclose(lab.lowest_entropy(runs), [0.1, 0.2])


@pytest.mark.parametrize(
    ("values", "verdict", "share"),
    [
        (np.full(20, 25.0), "typical", 1.0),
        (np.full(20, 20.0), "typical", 1.0),  # the ends are included
        (np.full(20, 30.0), "typical", 1.0),
        (np.full(20, 19.0), "not typical", 0.0),
        ([25.0] * 11 + [100.0] * 9, "typical", 0.55),
        ([25.0] * 5 + [100.0] * 15, "within the spread", 0.25),
        ([10.0] * 15 + [25.0] * 5, "within the spread", 0.25),
        ([25.0] + [100.0] * 39, "not typical", 1 / 40),  # one of forty is outside the middle 90%
        ([10.0] * 39 + [25.0], "not typical", 1 / 40),
        ([INF] * 20, "not typical", 0.0),
        ([25.0] * 5 + [INF] * 15, "within the spread", 0.25),
        ([NAN] * 20, "not typical", 0.0),
    ],
)
def test_a_claim_is_judged_by_the_median_and_by_the_middle_of_the_seeds(monkeypatch, values, verdict, share):
    claim = lab.Claim("PPO", "what", "20-30", 20.0, 30.0, lambda runs: np.asarray(values))
    monkeypatch.setattr(lab, "_claims", lambda: [claim])
    (row,) = lab.judge({})
    assert row["verdict"] == verdict
    assert row["share_of_seeds"] == pytest.approx(share)
    assert (row["variant"], row["what"], row["text"]) == ("PPO", "what", "20-30")
    assert row["borne_out_by"] == [20.0, 30.0]


def test_the_middle_90_percent_of_the_seeds(monkeypatch):
    values = np.random.default_rng(0).permutation(np.arange(1.0, 101.0))
    monkeypatch.setattr(lab, "_claims", lambda: [lab.Claim("PPO", "", "", 0.0, 1.0, lambda runs: values)])
    (row,) = lab.judge({})
    assert (row["median"], row["range_90"]) == (50.0, [5.0, 95.0])


def made_up(seed=0, num_updates=20):
    """Two seeds of every variant, from noise."""
    generator = np.random.default_rng(seed)
    noise = lambda: generator.uniform(0.1, 0.6, (2, num_updates))  # noqa: E731
    return {
        name: metrics(
            1000 * noise(), approx_kl=noise(), clip_fraction=noise(), entropy=noise(), num_epochs=40 * noise()
        )
        for name in lab.VARIANTS
    }


def test_every_claim_reads_a_variant_that_there_is():
    for claim in lab._claims():
        assert claim.variant in lab.VARIANTS
        assert claim.low < claim.high
        read = made_up()
        assert claim.measure(read).shape == (2,)
        changed = read | {claim.variant: made_up(seed=1)[claim.variant]}
        assert (claim.measure(changed) != claim.measure(read)).any(), f"{claim.what} does not look at {claim.variant}"


def test_comparisons_are_seed_by_seed_with_ppo():
    runs = made_up()
    measures = {(claim.variant, claim.what): claim.measure(runs) for claim in lab._claims()}
    fast, ppo = runs["aggressive"], runs["PPO"]
    np.testing.assert_allclose(
        measures["aggressive", "approx KL, times PPO's"],
        np.median(fast.approx_kl, axis=1) / np.median(ppo.approx_kl, axis=1),
    )
    np.testing.assert_allclose(
        measures["aggressive", "mean return over training, times PPO's"],
        fast.episode_return.mean(axis=1) / ppo.episode_return.mean(axis=1),
        rtol=1e-5,
    )


def test_the_table_has_the_verdict_of_every_claim():
    rows = lab.judge(made_up())
    assert len(rows) == len(lab._claims()) == 15
    assert lab.table(rows, 2).row_count == 15 + len({row["variant"] for row in rows})
    never = rows[0] | {"median": INF, "range_90": [25_600.0, INF]}
    cells = lab._cells(never)
    assert cells[4] == "25,600 to never"
    assert cells[3] == "never"


# The variants


def test_variants_compile_as_four_programs():
    """Only another loop length, or another algorithm, is another program."""
    assert len({config for config, _ in lab.VARIANTS.values()}) == 4


def test_every_variant_is_the_texts_run_but_for_what_its_name_says():
    for config, hparams in lab.VARIANTS.values():
        check_hparams(config, hparams)
        assert (config.env, config.num_envs, config.num_steps) == ("CartPole-v1", 1, 512)
        assert (config.minibatch_size, config.total_timesteps) == (64, 40_000)
        assert (hparams.gamma, hparams.gae_lambda, hparams.vf_coef, hparams.ent_coef) == (0.99, 0.95, 0.5, 0.0)
        assert hparams.final_lr_fraction == 0
    told = {
        name: (config.num_epochs, hparams.learning_rate, hparams.clip_eps, hparams.target_kl)
        for name, (config, hparams) in lab.VARIANTS.items()
    }
    assert told == {
        "PPO": (10, 1e-3, 0.2, INF),
        "one epoch": (1, 1e-3, 0.2, INF),
        "KL penalty": (10, 1e-3, INF, INF),
        "TRPO": (10, 1e-3, 0.2, INF),
        "aggressive": (40, 3e-3, 0.2, INF),
        "aggressive, no clip": (40, 3e-3, INF, INF),
        "aggressive, target KL": (40, 3e-3, 0.2, 0.01),
        "aggressive, no clip, target KL": (40, 3e-3, INF, 0.01),
    }
    assert lab.VARIANTS["PPO"][1].kl_coef == 0  # the program it shares with the penalty does not penalise it
    assert lab.VARIANTS["KL penalty"][1].kl_coef > 0


# The laboratory as a whole


def shorten(monkeypatch, num_updates=6):
    """Every variant for a few short updates of small networks."""
    changes = {"total_timesteps": num_updates * 64, "num_steps": 64, "num_minibatches": 1, "hidden_sizes": (8,)}
    variants = {
        name: (dataclasses.replace(config, **changes, num_epochs=min(config.num_epochs, 4)), hparams)
        for name, (config, hparams) in lab.VARIANTS.items()
    }
    monkeypatch.setattr(lab, "VARIANTS", variants)
    monkeypatch.setattr(lab, "BASE", dataclasses.replace(lab.BASE, **changes))


@pytest.mark.slow
def test_the_command_leaves_the_figure_the_table_and_the_numbers(monkeypatch, tmp_path, capsys):
    shorten(monkeypatch)
    out = tmp_path / "lab"
    assert lab.run_lab(num_seeds=2, seed=1, out=out) == 0
    assert {path.name for path in out.iterdir()} == {"lab.png", "lab.md", "lab.json", "lab.npz"}
    assert (out / "lab.png").stat().st_size > 20_000
    printed = capsys.readouterr().out
    assert "2 seeds" in printed
    report = json.loads((out / "lab.json").read_text(), parse_constant=pytest.fail)
    assert (report["num_seeds"], report["seed"], report["diverged"]) == (2, 1, {})
    assert len(report["claims"]) == 15
    assert set(report["final_return"]) == set(lab.VARIANTS)
    assert report["versions"]["jax"]
    page = (out / "lab.md").read_text()
    assert all(f"| {name} |" in page for name in lab.VARIANTS)
    assert sum(verdict in page for verdict in ("typical", "within the spread")) >= 1
    arrays = np.load(out / "lab.npz")
    assert set(arrays) == {f"{name}/{field}" for name in lab.VARIANTS for field in Metrics._fields}
    assert {arrays[name].shape for name in arrays} == {(2, 6)}
    # Seed j draws the same numbers in every variant: their first rollouts are one and the same.
    np.testing.assert_array_equal(arrays["PPO/num_episodes"][:, 0], arrays["aggressive, no clip/num_episodes"][:, 0])
    assert not (arrays["PPO/approx_kl"] == arrays["aggressive/approx_kl"]).any()
    assert (arrays["TRPO/exact_kl"] <= 0.01 * (1 + 1e-3)).all()
    assert np.isnan(arrays["PPO/step_scale"]).all()

    with pytest.raises(ValueError, match="holds a run already"):
        lab.run_lab(num_seeds=2, out=out)


def test_a_variant_that_does_not_stay_finite_is_named_and_the_exit_code_is_1(monkeypatch, tmp_path):
    broken = made_up()
    all_finite = np.ones((2, 20), bool)
    all_finite[1, 3:] = False
    broken["TRPO"] = broken["TRPO"]._replace(all_finite=all_finite)
    monkeypatch.setattr(lab, "train_variants", lambda num_seeds, seed: (broken, 1.0))
    assert lab.run_lab(num_seeds=2, out=tmp_path / "lab") == 1
    report = json.loads((tmp_path / "lab" / "lab.json").read_text())
    assert report["diverged"] == {"TRPO": {"1": 3}}


@pytest.mark.parametrize("num_seeds", [0, -1, 1.5])
def test_a_bad_number_of_seeds_is_refused_and_writes_nothing(tmp_path, num_seeds):
    with pytest.raises(ValueError, match=r"num_seeds = .*positive integer"):
        lab.run_lab(num_seeds=num_seeds, out=tmp_path / "never")
    assert not (tmp_path / "never").exists()
