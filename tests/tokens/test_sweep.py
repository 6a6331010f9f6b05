"""Sweeps of runs on token sequences, by the same engine as those on environments."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purejaxppo as ppo
from purejaxppo import kinds, results, segments, tokens
from purejaxppo.tokens import rlhf
from purejaxppo.tokens.types import TokenMetrics
from tests.helpers import assert_close, assert_equal
from tests.tokens.helpers import TASK, shared

CONFIG = tokens.TokenConfig(
    task="token-count",
    task_params={"vocab_size": 3, "response_len": 3, "width": 4},
    num_updates=3,
    batch_size=8,
    num_epochs=1,
    num_minibatches=1,
)
GRID = ppo.grid(tokens.TokenHParams(learning_rate=0.01), kl_coef=[0.1, 1.0])
sweep = functools.partial(ppo.sweep, CONFIG, GRID, 3, seed=5, chunk_size=4)  # six runs in two chunks


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A finished sweep and its directory."""
    directory = tmp_path_factory.mktemp("sweep")
    return sweep(directory=directory), directory


def test_a_sweep_equals_vmap_of_train_run_by_run(kept):
    keys = jnp.stack([jax.random.fold_in(jax.random.key(5), seed) for seed in range(3)])
    one = functools.partial(rlhf.train, CONFIG)
    _, metrics = jax.jit(jax.vmap(jax.vmap(one, (None, 0)), (0, None)))(GRID, keys)
    assert_close(kept[0].metrics, metrics)


def test_the_directory_holds_the_sweep_and_the_chunks_change_no_bit(kept):
    result, directory = kept
    loaded = ppo.SweepResult.load(directory)
    assert loaded.configs == result.configs
    assert_equal(loaded.hparams, result.hparams)
    assert_equal(loaded.metrics, result.metrics)
    (directory / "chunks" / "00001.npz").unlink()
    assert_equal(sweep(directory=directory).metrics, result.metrics)


def test_another_sweep_in_the_directory_is_refused(kept):
    with pytest.raises(ValueError, match=r"holds another sweep, which differs in hparams\.kl_coef$"):
        ppo.sweep(
            CONFIG, ppo.grid(tokens.TokenHParams(learning_rate=0.01), kl_coef=[0.1, 2.0]), 3, 5, directory=kept[1]
        )
    with pytest.raises(ValueError, match=r"holds another sweep, of runs on tokens$"):
        ppo.sweep(ppo.Config(total_timesteps=512), ppo.HParams(), 3, 5, directory=kept[1])


def test_the_numbers_to_quote_are_those_of_the_last_tenth(kept):
    result, _ = kept
    objective = (result.metrics.score - result.metrics.kl_coef * result.metrics.ref_kl)[:, :, -1]
    summary = result.summary()
    means = [row["objective"]["interquartile_mean"] for row in summary]
    np.testing.assert_allclose(means, results.interquartile_mean(objective.T.astype(float)), rtol=1e-5)
    assert result.best() == int(np.argmax(means))
    assert np.isnan(summary[0]["accuracy"]["interquartile_mean"])
    assert [row["diverged"] for row in summary] == [0.0, 0.0]
    frame = result.to_dataframe()
    assert list(frame.columns) == [
        "setting",
        "seed",
        "kl_coef",
        "objective",
        "score",
        "gold",
        "ref_kl",
        "accuracy",
        "finite",
    ]
    np.testing.assert_allclose(frame["objective"], objective.reshape(-1), rtol=1e-5)
    assert len(result.to_dataframe(curves=True)) == 2 * 3 * 3
    assert result.num_steps == 2 * 3 * 3 * 8


def test_a_run_that_diverged_is_the_worst():
    leaves = {name: np.ones((1, 4, 10), np.float32) for name in TokenMetrics._fields}
    leaves["all_finite"] = np.ones((1, 4, 10), bool)
    leaves["all_finite"][0, :2, 3:] = False
    (row,) = results.token_summary(TokenMetrics(**leaves), [10])
    assert row["diverged"] == 0.5
    assert row["score"]["interquartile_mean"] == -np.inf
    assert row["ref_kl"]["interquartile_mean"] == np.inf


def test_static_axes_are_programs_of_their_own():
    points = ppo.product(algorithm=["ppo", "grpo"], kl_coef=[0.1, 1.0])
    configs, hparams = ppo.settings(dataclasses.replace(CONFIG, batch_size=16), tokens.TokenHParams(), points)
    assert [config.algorithm for config in configs] == ["ppo", "ppo", "grpo", "grpo"]
    np.testing.assert_allclose(hparams.kl_coef, [0.1, 1.0, 0.1, 1.0])
    ranges = {"kl_coef": ppo.log_uniform(0.1, 1.0), "group_size": ppo.choice([2, 4])}
    drawn = ppo.draw(jax.random.key(0), 5, **ranges)
    assert len({point["kl_coef"] for point in drawn}) == 5


def test_the_types_of_metrics_are_those_of_the_program():
    one = jax.eval_shape(functools.partial(rlhf.train, CONFIG), tokens.TokenHParams(), jax.random.key(0))[1]
    assert {name: segments.TYPES.get(name, np.float32) for name in one._fields} == {
        name: leaf.dtype for name, leaf in one._asdict().items()
    }


@pytest.mark.parametrize(
    ("config", "hparams", "says"),
    [
        (CONFIG, ppo.HParams(), "config: TokenConfig with HParams: must be Config"),
        (ppo.Config(), tokens.TokenHParams(), "config: Config with TokenHParams: must be TokenConfig"),
        (tokens.TokenConfig(task="names"), tokens.TokenHParams(), "config.task 'names': needs `shared`"),
        (CONFIG, tokens.TokenHParams(kl_gain=0.1, kl_target=0.0), "hparams.kl_target = 0: must be above 0"),
        (dataclasses.replace(CONFIG, algorithm="dpo", num_epochs=4, num_minibatches=2), tokens.TokenHParams(), "pairs"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_anything_is_compiled(config, hparams, says):
    with pytest.raises(ValueError, match=says.replace(".", r"\.")):
        ppo.sweep(config, hparams, 2)


@pytest.mark.slow
def test_a_task_of_ones_own_is_swept_but_not_kept(tmp_path):
    task = dataclasses.replace(TASK, shared=shared)
    config = tokens.TokenConfig(task=task, num_updates=1, batch_size=4, num_epochs=1, num_minibatches=1)
    assert not kinds.of(config).is_known(config)
    with pytest.raises(ValueError, match=r"^config\.task: is a Task of one's own"):
        ppo.sweep(config, tokens.TokenHParams(), 2, directory=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert ppo.sweep(config, tokens.TokenHParams(), 2).metrics.score.shape == (1, 2, 1)


def test_unknown_names_are_told():
    with pytest.raises(ValueError, match=r"^sweep\.kl_coeff: there is no such setting; did you mean 'kl_coef'\?"):
        ppo.product(kl_coeff=[0.1], group_size=[4])
    with pytest.raises(ValueError, match=r"^sweep\.num_steps: there is no such setting"):
        ppo.settings(CONFIG, tokens.TokenHParams(), [{"num_steps": 4}])
