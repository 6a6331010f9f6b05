"""The closed forms of the token layer by hand, against slow twins, and at their limits."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purejaxppo import ops
from purejaxppo.tokens import objectives as o

EOS, PAD = 3, 4
TOKENS = jnp.array([[0, 3, 4], [1, 0, 2], [3, 4, 4], [0, 1, 3]])
MASK = jnp.array([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]], bool)
INF, NAN = math.inf, math.nan


def test_the_mask_goes_up_to_and_including_the_end():
    mask, truncated = o.response_mask(TOKENS, EOS)
    np.testing.assert_array_equal(mask, MASK)
    np.testing.assert_array_equal(truncated, [False, True, False, False])


def test_the_mask_does_not_look_behind_the_end():
    changed = TOKENS.at[0, 2].set(EOS).at[2, 1].set(0).at[2, 2].set(EOS)
    np.testing.assert_array_equal(o.response_mask(changed, EOS)[0], MASK)


def test_the_last_token_is_the_end_or_the_last_of_all():
    expected = [[0, 1, 0], [0, 0, 1], [1, 0, 0], [0, 0, 1]]
    np.testing.assert_array_equal(o.last_token(MASK), np.array(expected, bool))


@pytest.mark.parametrize("filler", [0.0, 1e30, NAN, INF])
def test_masked_mean_and_whitening_do_not_look_at_padding(filler):
    x = jnp.where(MASK, jnp.arange(12.0).reshape(4, 3), filler)
    kept = np.arange(12.0).reshape(4, 3)[np.asarray(MASK)]
    np.testing.assert_allclose(o.masked_mean(x, MASK), kept.mean(), rtol=1e-6)
    white = np.asarray(o.masked_whiten(x, MASK))
    np.testing.assert_allclose(white[np.asarray(MASK)], (kept - kept.mean()) / kept.std(), rtol=1e-5)
    assert (white[~np.asarray(MASK)] == 0).all()


def test_whitening_equal_advantages_gives_zeros():
    np.testing.assert_allclose(o.masked_whiten(jnp.full((4, 3), 0.7), MASK), 0.0, atol=1e-3)


# Rewards


def test_rewards_by_hand():
    log_prob = jnp.array([[-1.0, -2.0, 0.0], [-1.0, -1.0, -1.0]])
    reference = jnp.array([[-1.5, -1.0, 0.0], [-2.0, -1.0, -0.5]])
    mask = jnp.array([[1, 1, 0], [1, 1, 1]], bool)
    rewards = o.token_rewards(jnp.array([2.0, -3.0]), log_prob, reference, mask, 0.1)
    # row 0 ends at token 1: -0.1 * (-1 + 1.5), -0.1 * (-2 + 1) + 2; row 1 is cut off at token 2
    np.testing.assert_allclose(rewards, [[-0.05, 2.1, 0.0], [-0.1, 0.0, -2.95]], rtol=1e-6)


def test_the_rewards_sum_to_the_score_less_the_penalty():
    key = jax.random.key(0)
    log_prob, reference = jax.random.normal(key, (2, 4, 3))
    score = jnp.array([1.0, 2.0, 3.0, 4.0])
    total = o.token_rewards(score, log_prob, reference, MASK, 0.3).sum(-1)
    np.testing.assert_allclose(total, score - 0.3 * jnp.where(MASK, log_prob - reference, 0).sum(-1), rtol=1e-5)


def test_integer_scores_are_not_cut():
    rewards = o.token_rewards(jnp.array([1, 1, 1, 1]), jnp.zeros((4, 3)), jnp.ones((4, 3)), MASK, 0.25)
    np.testing.assert_allclose(rewards[0], [0.25, 1.25, 0.0])


@pytest.mark.parametrize(
    ("mode", "expected"), [("none", [1.0, 2.0]), ("replace", [1.0, -5.0]), ("subtract", [1.0, 7.0])]
)
def test_what_a_missing_end_costs(mode, expected):
    score = o.finished_score(jnp.array([1.0, 2.0]), jnp.array([False, True]), mode, -5.0)
    np.testing.assert_array_equal(score, expected)


def test_the_length_excess_by_hand():
    mask = jnp.arange(10) < jnp.array([1, 5, 6, 8, 10])[:, None]
    np.testing.assert_allclose(o.length_excess(mask, 0.5), [0, 0, 0.2, 0.6, 1.0], rtol=1e-5)
    np.testing.assert_allclose(o.length_excess(mask, 0.0), [0.1, 0.5, 0.6, 0.8, 1.0], rtol=1e-5)


# Advantages


def slow_gae(reward, value, mask, gamma, gae_lambda):
    """A Python loop from the end, through which the carry passes unchanged where the mask is false."""
    advantages = np.zeros(reward.shape)
    for row in range(len(reward)):
        carry, next_value = 0.0, 0.0
        for t in reversed(range(reward.shape[1])):
            if mask[row, t]:
                carry = reward[row, t] + gamma * next_value - value[row, t] + gamma * gae_lambda * carry
                next_value = value[row, t]
                advantages[row, t] = carry
    return advantages


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (1.0, 0.0)])
def test_gae_against_a_loop(gamma, gae_lambda):
    rng = np.random.default_rng(0)
    reward, value = rng.normal(size=(2, 9, 7))
    mask = np.arange(7) < rng.integers(1, 8, size=9)[:, None]
    arguments = (jnp.asarray(reward, jnp.float32), jnp.asarray(value, jnp.float32), jnp.asarray(mask))
    actual = o.token_gae(*arguments, gamma, gae_lambda)
    np.testing.assert_allclose(actual, slow_gae(reward, value, mask, gamma, gae_lambda), atol=1e-5)


def test_gae_of_a_finished_and_a_cut_off_response_by_hand():
    # gamma 1, lambda 1/2. Cut off at T=3: deltas 1+3-2=2, 0+5-3=2, 4-5=-1 -> -1, 2-0.5=1.5, 2+0.75=2.75.
    # Ended at its second token: deltas 1+3-2=2, 6-3=3 -> 3, 2+1.5=3.5; what stands behind is not looked at.
    reward = jnp.array([[1.0, 0.0, 4.0], [1.0, 6.0, 100.0]])
    value = jnp.array([[2.0, 3.0, 5.0], [2.0, 3.0, -100.0]])
    mask = jnp.array([[1, 1, 1], [1, 1, 0]], bool)
    np.testing.assert_allclose(o.token_gae(reward, value, mask, 1.0, 0.5), [[2.75, 1.5, -1.0], [3.5, 3.0, 0.0]])


def test_gae_with_lambda_1_is_what_is_still_to_come_less_the_value():
    rng = np.random.default_rng(1)
    reward, value = (jnp.asarray(x, jnp.float32) for x in rng.normal(size=(2, 4, 3)))
    to_come = np.cumsum(np.where(MASK, reward, 0)[:, ::-1], axis=1)[:, ::-1]
    expected = np.where(MASK, to_come - value, 0)
    np.testing.assert_allclose(o.token_gae(reward, value, MASK, 1.0, 1.0), expected, atol=1e-5)


def test_group_advantages_by_hand():
    reward = jnp.array([1.0, 2.0, 3.0, 10.0, 10.0, 40.0])
    std = math.sqrt(2 / 3)
    expected = [-1 / (std + 1e-4), 0.0, 1 / (std + 1e-4), *(np.array([-10, -10, 20]) / (math.sqrt(200) + 1e-4))]
    np.testing.assert_allclose(o.group_advantages(reward, 3), expected, rtol=1e-5)
    np.testing.assert_allclose(o.group_advantages(reward, 3, std=False), [-1, 0, 1, -10, -10, 20], rtol=1e-5)
    others = [1 - 2.5, 2 - 2, 3 - 1.5, 10 - 25, 10 - 25, 40 - 10]
    np.testing.assert_allclose(o.group_advantages(reward, 3, "leave_one_out", False), others, rtol=1e-5)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e8])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_a_group_of_equal_rewards_has_no_advantage(value, baseline):
    np.testing.assert_array_equal(o.group_advantages(jnp.full(6, value), 3, baseline), np.zeros(6))


# Objectives


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (1.1, 2.0, 2.2, 2.0),
        (1.35, 2.0, 2.6, 0.0),  # above 1 + 0.3
        (1.25, 2.0, 2.5, 2.0),  # between the two widths: the upper one counts
        (0.5, 2.0, 1.0, 2.0),
        (0.9, -1.0, -0.9, -1.0),
        (0.75, -1.0, -0.8, 0.0),  # below 1 - 0.2
        (1.4, -1.0, -1.4, -1.0),
        (3.5, -1.0, -3.0, 0.0),  # the floor of 3 times the advantage
        (3.5, 1.0, 1.3, 0.0),  # which good tokens do not have
    ],
)
def test_the_objective_by_hand(ratio, advantage, value, slope):
    log_ratio = jnp.log(jnp.float32(ratio))
    actual, gradient = jax.value_and_grad(o.policy_objective)(log_ratio, jnp.float32(advantage), 0.2, 0.3, 3.0)
    np.testing.assert_allclose(actual, value, rtol=1e-5)
    np.testing.assert_allclose(gradient, slope * ratio, rtol=1e-5)  # d/d log ratio = ratio * d/d ratio


def test_equal_widths_without_a_floor_are_the_clipped_surrogate():
    log_ratio, advantages = jax.random.normal(jax.random.key(0), (2, 100))
    actual = o.policy_objective(log_ratio, advantages, 0.2, 0.2, INF)
    np.testing.assert_array_equal(actual, ops.clipped_surrogate(log_ratio, advantages, 0.2))
    np.testing.assert_array_equal(o.outside_band(log_ratio, 0.2, 0.2), ops.clip_fraction(log_ratio, 0.2))


@pytest.mark.parametrize("advantage", [0.0, -1.0, 1.0])
def test_no_clip_and_no_floor_is_finite_and_plain(advantage):
    value, gradient = jax.value_and_grad(o.policy_objective)(jnp.float32(0.5), jnp.float32(advantage), INF, INF, INF)
    np.testing.assert_allclose([value, gradient], math.exp(0.5) * advantage, rtol=1e-6)


def test_the_band_has_two_sides():
    log_ratio = jnp.log(jnp.array([0.75, 0.85, 1.25, 1.35]))
    np.testing.assert_array_equal(o.outside_band(log_ratio, 0.2, 0.3), [1, 0, 0, 1])


# Controllers


def slow_proportional(kl_coef, kl, target, gain):
    return kl_coef * (1 + gain * min(max(kl / target - 1, -0.2), 0.2))


def slow_doubling(kl_coef, kl, target):
    return kl_coef * 2 if kl > 1.5 * target else kl_coef / 2 if kl < target / 1.5 else kl_coef


def test_both_controllers_against_numpy_for_50_updates():
    kls = np.random.default_rng(0).uniform(0, 15, size=50)
    a = b = 0.1
    c = d = jnp.float32(0.1)
    for kl in kls:
        a, b = slow_proportional(a, kl, 6, 0.1), slow_doubling(b, kl, 6)
        c = o.proportional_kl_coef(c, jnp.float32(kl), 6.0, 0.1)
        d = ops.adapt_kl_coef(d, jnp.float32(kl), 6.0, 2.0)
        np.testing.assert_allclose([c, d], [a, b], rtol=1e-4)


def test_the_example_of_the_text():
    assert ops.adapt_kl_coef(jnp.float32(0.1), jnp.float32(10), 6.0, 2.0) == np.float32(0.2)
    np.testing.assert_allclose(o.proportional_kl_coef(jnp.float32(0.1), jnp.float32(10), 6.0, 0.1), 0.102, rtol=1e-6)


@pytest.mark.parametrize(("gain", "expected"), [(64 / 10_000, 542), (0.1, 35)])
def test_how_long_the_proportional_rule_takes_to_double(gain, expected):
    coefficient, updates = 0.1, 0
    while coefficient < 0.2:
        coefficient, updates = slow_proportional(coefficient, 100.0, 6.0, gain), updates + 1
    assert abs(updates - expected) <= 1
    jumped = jax.lax.fori_loop(
        0, updates, lambda _, c: o.proportional_kl_coef(c, jnp.float32(100), 6.0, gain), jnp.float32(0.1)
    )
    np.testing.assert_allclose(jumped, coefficient, rtol=1e-3)


def test_fixed_points_of_the_proportional_rule():
    coefficient = jnp.float32(0.3)
    assert o.proportional_kl_coef(coefficient, jnp.float32(6), 6.0, 0.1) == coefficient
    assert o.proportional_kl_coef(coefficient, jnp.float32(60), 6.0, 0.0) == coefficient
    assert o.proportional_kl_coef(jnp.float32(0), jnp.float32(60), 6.0, 0.1) == 0
    np.testing.assert_allclose(o.proportional_kl_coef(coefficient, jnp.float32(NAN), 6.0, 0.1), 0.306, rtol=1e-6)


# Preferences


def test_dpo_by_hand():
    margin, one = jnp.array([2.0]), jnp.ones(1)
    np.testing.assert_allclose(o.dpo_loss(margin, 0.5, one, 0.0), math.log(1 + math.exp(-1)), rtol=1e-6)
    np.testing.assert_allclose(o.dpo_loss(margin, 0.5, 0 * one, 0.0), math.log(1 + math.exp(1)), rtol=1e-6)
    smooth = 0.9 * math.log(1 + math.exp(-1)) + 0.1 * math.log(1 + math.exp(1))
    np.testing.assert_allclose(o.dpo_loss(margin, 0.5, one, 0.1), smooth, rtol=1e-6)
    np.testing.assert_allclose(o.dpo_loss(0 * margin, 0.5, one, 0.0), math.log(2), rtol=1e-6)


@pytest.mark.parametrize(("loss", "inverse"), [("dpo", lambda p: math.log(p / (1 - p))), ("ipo", lambda p: p - 0.5)])
@pytest.mark.parametrize("preference", [0.1, 0.5, 0.8])
def test_the_losses_have_their_minimum_at_the_reward_difference(loss, inverse, preference):
    beta, p = 0.25, jnp.array([preference])

    def value(margin):
        return (o.dpo_loss(margin, beta, p, 0.0) if loss == "dpo" else o.ipo_loss(margin, beta, p)).sum()

    best = jnp.array([inverse(preference) / beta])
    np.testing.assert_allclose(jax.grad(value)(best), 0.0, atol=1e-6)
    assert value(best) < value(best + 0.1)
    assert value(best) < value(best - 0.1)


def test_ipo_of_a_certain_preference_is_the_papers():
    tau, margin = 0.3, jnp.array([0.7])
    paper = (0.7 - 1 / (2 * tau)) ** 2
    np.testing.assert_allclose(o.ipo_loss(margin, tau, jnp.ones(1)), tau**2 * paper, rtol=1e-5)


def test_best_of_n_kl():
    np.testing.assert_allclose(o.best_of_n_kl(1), 0.0)
    np.testing.assert_allclose(
        o.best_of_n_kl(jnp.array([2, 16])), [math.log(2) - 0.5, math.log(16) - 15 / 16], rtol=1e-6
    )
