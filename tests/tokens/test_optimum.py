"""Whole runs against the best policy there is, on the two tasks where it is known exactly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purejaxppo.tokens import rlhf, tasks
from purejaxppo.tokens.config import TokenConfig, TokenHParams
from purejaxppo.tokens.segments import CAPACITY, Own, Runs

COEFS, SEEDS = (1.0, 0.5, 0.25), 4
KL_COEF = np.repeat(np.float32(COEFS), SEEDS)
TASK = tasks.make("enum")


@functools.cache
def reference():
    """Log-probabilities of all responses under the reference."""
    return np.asarray(jax.jit(lambda params: tasks.enum_log_probs(TASK, params))(TASK.shared().reference), np.float64)


def runs_of(config, **hparams):
    """Final states of 3 coefficients x 4 seeds, NumPy leaves [12, ...]."""
    settings = TokenHParams(**hparams)
    own = Own(TokenHParams(*(np.full(12, leaf, np.float32) for leaf in settings))._replace(kl_coef=KL_COEF))
    runs = Runs(config, None, own)
    keys = jax.vmap(jax.random.key)(np.tile(np.arange(SEEDS), 3))
    state, finite = runs.start(keys), True
    for done in range(0, config.num_updates, CAPACITY):
        state, metrics = runs.advance(state, min(CAPACITY, config.num_updates - done))
        finite &= metrics.all_finite.all()
    assert finite
    return runs.take(state)


# The closed forms


@pytest.mark.parametrize(
    ("kl_coef", "reward", "kl"),
    [
        (2.0, "1.525", "0.139"),
        (1.0, "2.238", "0.681"),
        (0.5, "4.108", "3.520"),
        (0.25, "7.091", "12.03"),
        (0.1, "7.997", "16.61"),
    ],
)
def test_the_optimum_of_counting_tokens(kl_coef, reward, kl):
    best = tasks.token_count_optimum(8, 8, kl_coef)
    for actual, expected in ((best.reward, reward), (best.kl, kl)):
        assert f"{actual:.{len(expected.split('.')[1])}f}" == expected
    np.testing.assert_allclose(best.objective, best.reward - kl_coef * best.kl, rtol=1e-9)


def test_all_364_responses_are_there_once_and_have_probability_1():
    sequences = tasks.enum_sequences()
    assert sequences.shape == (364, 5)
    assert len({tuple(row) for row in sequences}) == 364
    np.testing.assert_allclose(np.exp(reference()).sum(), 1.0, rtol=1e-5)


def test_the_scores_by_hand():
    words = {"ab": 2.5, "abc": 3.5, "aab": 2.0, "bca": 2.0, "": 1.0, "ababc": 3.0, "aaaaa": 0.0, "cab": 3.5}
    rows = [[*("abc".index(letter) for letter in word), 3, 4, 4, 4, 4, 4][:5] for word in words]
    np.testing.assert_array_equal(tasks.enum_scores(np.array(rows)), list(words.values()))
    np.testing.assert_array_equal(tasks.enum_scores(jnp.array(rows)), list(words.values()))


@pytest.mark.parametrize("kl_coef", COEFS)
def test_no_policy_beats_the_optimum_and_the_tilted_reference_is_it(kl_coef):
    best = tasks.enum_optimum(reference(), kl_coef)
    scores = tasks.enum_scores(tasks.enum_sequences()).astype(np.float64)
    np.testing.assert_allclose(best.objective, best.reward - kl_coef * best.kl, rtol=1e-9)
    tilted = np.exp(reference() + scores / kl_coef)
    tilted /= tilted.sum()
    for seed in range(20):
        probs = tilted * np.exp(0.1 * np.random.default_rng(seed).normal(size=364))
        probs /= probs.sum()
        objective = probs @ scores - kl_coef * probs @ (np.log(probs) - reference())
        far = kl_coef * probs @ (np.log(probs) - np.log(tilted))
        assert 0 < far < 0.1
        np.testing.assert_allclose(best.objective - objective, far, rtol=1e-6)


def test_the_exact_gradient_is_the_policy_gradient_of_reward_less_penalty():
    kl_coef, params = 0.5, jax.tree.map(lambda leaf: leaf + 0.05, TASK.shared().reference)

    def objective(params):
        return tasks.enum_exact(TASK, params, TASK.shared().reference, kl_coef).objective

    def reinforce(params):
        """sum_y pi(y) (r(y) - kl_coef * log ratio) grad log pi(y), the first two factors held."""
        log_probs = tasks.enum_log_probs(TASK, params)
        total = tasks.enum_scores(tasks.enum_sequences()) - kl_coef * (
            log_probs - jnp.asarray(reference(), jnp.float32)
        )
        return jnp.sum(jax.lax.stop_gradient(jnp.exp(log_probs) * total) * log_probs)

    exact, estimated = jax.jit(lambda params: (jax.grad(objective)(params), jax.grad(reinforce)(params)))(params)
    for a, b in zip(jax.tree.leaves(exact), jax.tree.leaves(estimated), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_the_preferences_of_all_pairs_are_those_of_the_scores():
    pairs = TASK.shared().pairs
    assert len(pairs.preference) == 364 * 363 // 2
    difference = tasks.enum_scores(pairs.first) - tasks.enum_scores(pairs.second)
    np.testing.assert_allclose(np.log(pairs.preference / (1 - pairs.preference)), difference, atol=1e-5)


# The runs


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"algorithm": "ppo", "num_updates": 200}, {"algorithm": "grpo", "num_updates": 300, "group_size": 32}],
    ids=str,
)
def test_runs_on_all_responses_come_within_2_percent_of_the_optimum(changes):
    config = TokenConfig(task="enum", batch_size=256, **changes)
    _assert_near_the_optimum(runs_of(config, learning_rate=1.5e-3))


@pytest.mark.slow
def test_dpo_on_exact_preferences_comes_within_2_percent_of_the_optimum():
    config = TokenConfig(task="enum", algorithm="dpo", num_updates=600, batch_size=256)
    _assert_near_the_optimum(runs_of(config, learning_rate=2e-3))


def _assert_near_the_optimum(state):
    exact = jax.vmap(functools.partial(tasks.enum_exact, TASK), (0, None, 0))
    reached = jax.jit(exact)(state.params["policy"], TASK.shared().reference, KL_COEF)
    best = np.array([tasks.enum_optimum(reference(), coef).objective for coef in KL_COEF])
    gap = 1 - np.asarray(reached.objective) / best
    print("gap to the optimum:", gap.round(4))
    assert (gap > -1e-5).all()
    assert (gap < 0.02).all()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_runs_on_counting_tokens_reach_the_optimum(algorithm):
    config = TokenConfig(
        task="token-count", algorithm=algorithm, num_updates=200, batch_size=128, num_epochs=2, num_minibatches=1
    )
    state = runs_of(config, learning_rate=3e-3)
    task, shared = tasks.resolve(config, None)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, 0))
    def objective(policy, kl_coef):
        """The score that is expected in each state, and the exact KL of it: the states alone are sampled."""
        quality, _ = rlhf.draw(task, shared, policy, 1024, 1, jax.random.key(99))
        expected = jnp.sum(jnp.exp(quality.responses.log_probs[..., 0]), axis=-1)
        return jnp.mean(expected - kl_coef * quality.ref_kl)

    reached = np.asarray(objective(state.params["policy"], KL_COEF))
    best = np.array([tasks.token_count_optimum(8, 8, coef).objective for coef in KL_COEF])
    print("gap to the optimum:", (1 - reached / best).round(4))
    assert (np.abs(1 - reached / best) < 0.005).all()
