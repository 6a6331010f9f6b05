"""Reward models, best of n, and fitting."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purejaxppo.tokens import dpo, preferences, reward, rlhf
from purejaxppo.tokens.config import TokenConfig, TokenHParams, as_float32
from purejaxppo.tokens.fitting import Fit
from purejaxppo.tokens.model import token_log_prob
from purejaxppo.tokens.objectives import best_of_n_kl
from purejaxppo.tokens.types import Pairs, Task
from tests.tokens.helpers import EOS, PAD, PROMPT_MASK, PROMPTS, SMALL, params, shared, weighted_count

FIRST = np.array([[0, 1, EOS, PAD], [2, 2, 2, 2], [EOS, PAD, PAD, PAD], [0, 0, EOS, PAD]], np.int32)
SECOND = np.array([[1, EOS, PAD, PAD], [2, 2, 2, 2], [0, 0, 0, 1], [0, 0, 0, EOS]], np.int32)
PAIRS = Pairs(
    PROMPTS[[0, 1, 2, 0]], PROMPT_MASK[[0, 1, 2, 0]], FIRST, SECOND, np.array([1.0, 1.0, 0.0, 1.0], np.float32)
)


@functools.cache
def model():
    return reward.init(SMALL, params(SMALL), jax.random.key(1))


@jax.jit
def scores(model, responses):
    return reward.score(SMALL, model, responses)


def test_bradley_terry_by_hand():
    loss = reward.bradley_terry_loss(jnp.array([1.0, 1.0, 0.0]), jnp.array([1.0, 0.0, 0.5]))
    np.testing.assert_allclose(loss, [math.log(1 + math.exp(-1)), math.log(1 + math.exp(1)), math.log(2)], rtol=1e-6)


def test_the_score_is_read_at_the_last_token_itself():
    responses = reward.both(SMALL, PAIRS)
    base = np.asarray(scores(model(), responses))
    mask = np.asarray(responses.mask)
    behind = responses._replace(tokens=jnp.where(mask, responses.tokens, 0))
    np.testing.assert_array_equal(scores(model(), behind), base)
    ends = mask.sum(1) - 1
    changed = np.asarray(responses.tokens).copy()
    changed[np.arange(8), ends] = (changed[np.arange(8), ends] + 1) % 4
    assert (np.asarray(scores(model(), responses._replace(tokens=jnp.asarray(changed)))) != base).all()


def test_standard_scores_on_the_reference_have_mean_0_and_std_1():
    responses = reward.both(SMALL, PAIRS)
    values = scores(reward.standardized(SMALL, model() | {"gain": 7.0, "bias": 3.0}, responses), responses)
    np.testing.assert_allclose([values.mean(), values.std()], [0.0, 1.0], atol=1e-4)


def test_fitting_looks_at_the_first_pairs_alone_and_learns_them():
    settings = Fit(num_steps=60, batch_size=8, learning_rate=1e-2)
    fit = jax.jit(jax.vmap(lambda num: reward.fit(SMALL, model(), PAIRS, num, jax.random.key(2), settings)))
    fitted, losses = fit(jnp.array([1, 4]))
    few, all_of_them = (jax.tree.map(lambda leaf, i=i: leaf[i], fitted) for i in range(2))
    assert jax.jit(lambda params: reward.accuracy(SMALL, params, PAIRS))(all_of_them) == 1.0
    assert losses[0, -10:].mean() < 0.1  # of one pair
    assert losses[1, -10:].mean() < 0.4  # of four, one of which is of equal strings: never below log(2) / 4
    assert not np.allclose(few["head"], all_of_them["head"])


def test_pairs_of_equal_strings_are_counted_and_left_out_of_the_accuracy():
    assert reward.num_equal_pairs(PAIRS) == 1


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_best_of_n_is_the_mean_over_all_subsets(n):
    rng = np.random.default_rng(0)
    values, ranked_by = rng.normal(size=(2, 6)).astype(np.float32)
    expected = np.mean(
        [values[max(subset, key=lambda i: ranked_by[i])] for subset in itertools.combinations(range(6), n)]
    )
    np.testing.assert_allclose(reward.best_of_n(jnp.asarray(values), n, jnp.asarray(ranked_by)), expected, rtol=1e-5)


def test_best_of_more_than_there_are_is_refused():
    with pytest.raises(ValueError, match=r"n = 7: must be in \[1, 6\]"):
        reward.best_of_n(jnp.zeros(6), 7, jnp.zeros(6))


@pytest.mark.parametrize("n", [2, 5, 50])
def test_the_kl_of_best_of_n_matches_its_formula(n):
    # of 100,000 equally likely responses of different scores the k-th lowest is the best with (k^n - (k-1)^n) / M^n
    steps = np.linspace(0, 1, 100_001) ** n
    probs = np.diff(steps)
    exact = np.sum(np.where(probs > 0, probs * np.log(np.maximum(probs, 1e-300) * 100_000), 0))
    np.testing.assert_allclose(best_of_n_kl(n), exact, atol=1e-3)


# Pairs, and learning from them


def test_pairs_are_labelled_by_the_gold_reward():
    task = Task(SMALL, 4, weighted_count, gold=lambda gold, responses: gold * weighted_count(1.0, responses))
    draw = jax.jit(lambda sharpness: preferences.draw_pairs(task, shared(gold=1.0), 400, sharpness, jax.random.key(0)))
    pairs = draw(2.0)
    first, second = ((np.asarray(side) == 0).sum(1) for side in (pairs.first, pairs.second))
    np.testing.assert_array_equal(pairs.prompt[:, -1] >= 0, True)
    chance = 1 / (1 + np.exp(-2.0 * (first - second)))
    error = np.asarray(pairs.preference) - chance
    assert abs(error.sum()) < 4 * np.sqrt((chance * (1 - chance)).sum())
    assert abs((error * (first - second)).sum()) < 4 * np.sqrt((chance * (1 - chance) * (first - second) ** 2).sum())
    certain = draw(jnp.inf)
    told_apart = first != second
    np.testing.assert_array_equal(np.asarray(certain.preference)[told_apart], (first > second)[told_apart])
    agreement = float(preferences.agreement(task, 1.0, certain))
    assert agreement == 1.0


def test_the_first_dpo_loss_is_log_2_and_its_gradient_raises_the_preferred():
    config = TokenConfig(task=Task(SMALL, 4, weighted_count), algorithm="dpo", batch_size=4)
    hparams, policy = as_float32(TokenHParams()), {"policy": params(SMALL)}

    @jax.jit
    def step(policy):
        return jax.value_and_grad(dpo.pair_loss, has_aux=True)(
            policy, config, hparams, config.task, params(SMALL), PAIRS, 0.5
        )

    (loss, (_, margins)), gradient = step(policy)
    np.testing.assert_allclose(loss, math.log(2), rtol=1e-5)
    np.testing.assert_allclose(margins, 0.0, atol=1e-5)
    moved = jax.tree.map(lambda p, g: p - 0.1 * g, policy, gradient)
    (lower, (_, margins)), _ = step(moved)
    assert lower < loss
    assert margins[1] == 0  # equal strings


@pytest.mark.parametrize("algorithm", ["dpo", pytest.param("ipo", marks=pytest.mark.slow)])
def test_dpo_and_ipo_learn_without_sampling(algorithm):
    config = TokenConfig(task=Task(SMALL, 4, weighted_count), algorithm=algorithm, batch_size=4, num_updates=20)
    train = jax.jit(functools.partial(rlhf.train, config))
    state, metrics = train(TokenHParams(learning_rate=np.float32(1e-2)), jax.random.key(0), shared(pairs=PAIRS))
    assert metrics.all_finite.all()
    assert metrics.policy_loss[-1] < metrics.policy_loss[0]
    assert metrics.accuracy[-1] == 1.0
    assert np.isnan(metrics.ref_kl).all()
    assert set(state.params) == {"policy"}


def test_the_reference_learns_the_given_responses():
    fit = jax.jit(lambda key: preferences.fit_reference(SMALL, FIRST[:, :1] * 0, FIRST, key, Fit(80, 8, 2e-2)))
    fitted, losses = fit(jax.random.key(0))
    assert losses[-1] < 0.75 * losses[0]
    responses = reward.as_responses(SMALL, FIRST[:, :1] * 0, np.ones((4, 1), bool), jnp.asarray(FIRST))
    total = jax.jit(lambda params: token_log_prob(SMALL, params, responses).sum())(fitted)
    np.testing.assert_allclose(
        preferences.nll(SMALL, fitted, responses), -total / np.asarray(responses.mask).sum(), rtol=1e-4
    )
