"""Settings: every combination, random ones, written out; of traced and of static fields."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import purejaxppo as ppo
from purejaxppo import kinds
from purejaxppo.settings import varying
from tests.helpers import tiny

INF = float("inf")


# Every combination


def test_a_grid_is_every_combination_the_last_axis_fastest():
    grid = ppo.grid(ppo.HParams(), clip_eps=[0.1, 0.2, INF], learning_rate=[3e-4, 1e-3])
    np.testing.assert_allclose(grid.clip_eps, [0.1, 0.1, 0.2, 0.2, INF, INF])
    np.testing.assert_allclose(grid.learning_rate, [3e-4, 1e-3, 3e-4, 1e-3, 3e-4, 1e-3])


def test_a_grid_keeps_the_other_fields():
    grid = ppo.grid(ppo.HParams(gamma=0.5), gae_lambda=[0.1, 0.2])
    for field, leaf in grid._asdict().items():
        assert (leaf.shape, leaf.dtype) == ((2,), jnp.float32), field
        if field != "gae_lambda":
            np.testing.assert_allclose(leaf, getattr(ppo.HParams(gamma=0.5), field), rtol=1e-6)


def test_a_grid_of_nothing_is_one_setting():
    assert {leaf.shape for leaf in ppo.grid(ppo.HParams())} == {(1,)}


def test_a_grid_takes_arrays():
    np.testing.assert_allclose(ppo.grid(ppo.HParams(), gamma=jnp.array([0.5, 0.9])).gamma, [0.5, 0.9])


def test_a_grid_refuses_unknown_names():
    with pytest.raises(ValueError, match=r"^hparams\.clip_epsilon: .*did you mean 'clip_eps'\?$"):
        ppo.grid(ppo.HParams(), clip_epsilon=[0.1])


def test_a_grid_refuses_static_fields():
    with pytest.raises(ValueError, match=r"^hparams\.num_steps: there is no such setting"):
        ppo.grid(ppo.HParams(), num_steps=[64, 128])


@pytest.mark.parametrize("values", [[], 0.1, None, "0.1", {}])
def test_an_axis_is_a_list_of_values(values):
    with pytest.raises(ValueError, match=r"^gamma = .*: must be a list of at least one value$"):
        ppo.grid(ppo.HParams(), gamma=values)
    with pytest.raises(ValueError, match=r"^gamma = .*: must be a list of at least one value$"):
        ppo.product(gamma=values)


@pytest.mark.parametrize("value", [[0.1], "0.1", True, None])
def test_a_hyperparameter_is_a_number(value):
    with pytest.raises(ValueError, match=r"^hparams\.gamma = .*: must be a number$"):
        ppo.grid(ppo.HParams(), gamma=[0.5, value])


def test_a_product_mixes_static_and_traced_fields():
    points = ppo.product(hidden_sizes=[[8], [16, 16]], gamma=[0.9, 0.99])
    assert points == [
        {"hidden_sizes": [8], "gamma": 0.9},
        {"hidden_sizes": [8], "gamma": 0.99},
        {"hidden_sizes": [16, 16], "gamma": 0.9},
        {"hidden_sizes": [16, 16], "gamma": 0.99},
    ]


# Points -> settings


def test_settings_take_each_points_values():
    base = tiny(), ppo.HParams(gamma=0.5)
    configs, hparams = ppo.settings(*base, ppo.product(num_steps=[8, 16], learning_rate=[1e-3, 1e-2]))
    assert [config.num_steps for config in configs] == [8, 8, 16, 16]
    assert configs[0] is configs[1]
    np.testing.assert_allclose(hparams.learning_rate, [1e-3, 1e-2] * 2, rtol=1e-6)
    np.testing.assert_array_equal(hparams.gamma, [0.5] * 4)
    assert {(leaf.shape, str(leaf.dtype)) for leaf in hparams} == {((4,), "float32")}


def test_settings_may_be_written_out():
    configs, hparams = ppo.settings(tiny(), ppo.HParams(), [{"learning_rate": 1e-2}, {"num_steps": 16}, {}])
    assert [config.num_steps for config in configs] == [8, 16, 8]
    np.testing.assert_allclose(hparams.learning_rate, [1e-2, 2.5e-4, 2.5e-4], rtol=1e-6)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "settings: must be a list of at least one point"),
        ([{"num_stepz": 8}], r"sweep\.num_stepz: there is no such setting; did you mean 'num_steps'\?"),
        ([{}, {"num_steps": 7, "num_envs": 1}], r"config\.num_minibatches = 2: must divide"),
        ([{"algorithm": "ppo"}, {"algorithm": "trop"}], r"config\.algorithm = 'trop'.*did you mean 'trpo'"),
    ],
)
def test_a_wrong_point_is_refused_whichever_it_is(points, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        ppo.settings(tiny(), ppo.HParams(), points)


def test_config_and_hyperparameters_share_no_name():
    assert not set(kinds.ENVIRONMENTS.config_fields) & set(ppo.HParams._fields)


def test_the_fields_that_differ_are_the_axes():
    points = ppo.product(num_steps=[8, 16], gamma=[0.5], learning_rate=[0.25, 0.5])
    assert varying(*ppo.settings(tiny(), ppo.HParams(), points)) == {
        "num_steps": (8, 8, 16, 16),
        "learning_rate": (0.25, 0.5, 0.25, 0.5),
    }


# Random ones


RANGES = {
    "learning_rate": ppo.log_uniform(1e-4, 1e-2),
    "gae_lambda": ppo.uniform(0.8, 1.0),
    "num_steps": ppo.choice([8, 16, 32]),
}


def test_random_values_have_the_distribution_that_was_asked_for():
    points = ppo.draw(jax.random.key(0), 2000, **RANGES)
    rates = np.log([point["learning_rate"] for point in points])
    assert scipy.stats.kstest(rates, "uniform", (np.log(1e-4), np.log(100))).pvalue > 0.01
    lambdas = [point["gae_lambda"] for point in points]
    assert scipy.stats.kstest(lambdas, "uniform", (0.8, 0.2)).pvalue > 0.01
    _, counts = np.unique([point["num_steps"] for point in points], return_counts=True)
    assert scipy.stats.chisquare(counts).pvalue > 0.01
    assert abs(scipy.stats.pearsonr(rates, lambdas).statistic) < 0.1


def test_a_random_value_depends_on_its_own_field_and_index_alone():
    points = ppo.draw(jax.random.key(0), 5, **RANGES)
    assert ppo.draw(jax.random.key(0), 3, **RANGES) == points[:3]
    rates = [point["learning_rate"] for point in ppo.draw(jax.random.key(0), 5, learning_rate=RANGES["learning_rate"])]
    assert rates == [point["learning_rate"] for point in points]
    assert ppo.draw(jax.random.key(1), 5, **RANGES) != points


def test_a_sample_is_random_hyperparameters():
    ranges = {"learning_rate": RANGES["learning_rate"], "gamma": ppo.choice([0.5, 1])}
    hparams = ppo.sample(ppo.HParams(clip_eps=0.3), jax.random.key(0), 4, **ranges)
    points = ppo.draw(jax.random.key(0), 4, **ranges)
    np.testing.assert_allclose(hparams.learning_rate, [point["learning_rate"] for point in points], rtol=1e-6)
    np.testing.assert_allclose(hparams.clip_eps, [0.3] * 4, rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ppo.uniform(1, 0), r"uniform = \[1, 0\]: must be low < high, both finite"),
        (lambda: ppo.uniform(0, INF), "uniform"),
        (lambda: ppo.log_uniform(0, 1), r"log_uniform = \[0, 1\]: must be 0 < low < high"),
        (lambda: ppo.choice([]), r"choice = \[\]: must be a list of at least one value"),
        (lambda: ppo.draw(jax.random.key(0), 0), "num_settings = 0: must be a positive integer"),
        (lambda: ppo.draw(jax.random.key(0), 2, gama=RANGES["gae_lambda"]), "sweep.gama: .*'gamma'"),
        (lambda: ppo.draw(jax.random.key(0), 2, gamma=[0.5]), r"gamma = \[0.5\]: must be uniform"),
        (lambda: ppo.sample(ppo.HParams(), jax.random.key(0), 2, num_steps=RANGES["num_steps"]), "hparams.num_steps"),
    ],
)
def test_a_wrong_range_is_refused(make, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        make()
