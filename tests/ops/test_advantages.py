"""Advantages, by hand and against a slow NumPy twin. gamma 0.5 and lambda 0.5 keep the numbers short."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purejaxppo import ops


def gae(reward, value, next_value, terminated=None, truncated=None, gamma=0.5, gae_lambda=0.5):
    no = np.zeros(np.shape(reward), bool)
    flags = [no if flag is None else np.asarray(flag, bool) for flag in (terminated, truncated)]
    reward, value, next_value = (jnp.asarray(x, jnp.float32) for x in (reward, value, next_value))
    return np.asarray(ops.gae(reward, value, next_value, *flags, gamma, gae_lambda))


def slow_gae(reward, value, next_value, terminated, truncated, gamma, gae_lambda):
    """The sum of discounted TD errors up to the end of the episode, written out for each step."""
    advantages = np.zeros_like(reward)
    for n in range(reward.shape[1]):
        for start in range(reward.shape[0]):
            weight = 1.0
            for t in range(start, reward.shape[0]):
                bootstrap = 0.0 if terminated[t, n] else next_value[t, n]
                advantages[start, n] += weight * (reward[t, n] + gamma * bootstrap - value[t, n])
                if terminated[t, n] or truncated[t, n]:
                    break
                weight *= gamma * gae_lambda
    return advantages


def random_rollout(seed=0, shape=(9, 5)):
    rng = np.random.default_rng(seed)
    reward, value, next_value = rng.normal(size=(3, *shape)).astype(np.float32)
    terminated, truncated = rng.random((2, *shape)) < 0.2
    return reward, value, next_value, terminated, truncated


# Without an end: deltas 1 + 0.5*3 - 2 = 0.5, 2 + 0.5*4 - 3 = 1, 3 + 0.5*5 - 4 = 1.5; decay 0.25.
REWARD, VALUE, NEXT_VALUE = [1.0, 2.0, 3.0], [2.0, 3.0, 4.0], [3.0, 4.0, 5.0]


def test_no_episode_end_bootstraps_from_the_last_next_value():
    np.testing.assert_allclose(gae(REWARD, VALUE, NEXT_VALUE), [0.5 + 0.25 * 1.375, 1 + 0.25 * 1.5, 1.5])


def test_terminal_inside_the_rollout_stops_bootstrap_and_trace():
    # delta_1 = 2 - 3 = -1: no bootstrap, and nothing of step 2.
    np.testing.assert_allclose(gae(REWARD, VALUE, NEXT_VALUE, terminated=[0, 1, 0]), [0.5 + 0.25 * -1, -1, 1.5])


def test_time_limit_inside_the_rollout_bootstraps_and_cuts_the_trace():
    # next_value of step 1 is of the final observation, here 10: delta_1 = 2 + 0.5*10 - 3 = 4, and nothing of step 2.
    np.testing.assert_allclose(gae(REWARD, VALUE, [3.0, 10.0, 5.0], truncated=[0, 1, 0]), [0.5 + 0.25 * 4, 4, 1.5])


def test_terminated_wins_where_both_flags_are_set():
    both = gae(REWARD, VALUE, NEXT_VALUE, terminated=[0, 1, 0], truncated=[0, 1, 0])
    np.testing.assert_allclose(both, [0.25, -1, 1.5])


def test_terminal_on_the_last_step():
    # delta_2 = 3 - 4 = -1
    expected = [0.5 + 0.25 * 0.75, 1 + 0.25 * -1, -1]
    np.testing.assert_allclose(gae(REWARD, VALUE, NEXT_VALUE, terminated=[0, 0, 1]), expected)


def test_time_limit_on_the_last_step_equals_no_end():
    np.testing.assert_array_equal(gae(REWARD, VALUE, NEXT_VALUE, truncated=[0, 0, 1]), gae(REWARD, VALUE, NEXT_VALUE))


def test_terminal_on_the_first_step():
    # delta_0 = 1 - 2 = -1
    np.testing.assert_allclose(gae(REWARD, VALUE, NEXT_VALUE, terminated=[1, 0, 0]), [-1, 1.375, 1.5])


@pytest.mark.parametrize("kind", ["terminated", "truncated"])
def test_two_episodes_in_a_row_equal_each_alone(kind):
    reward, value, next_value, *_ = (x[:, 0] for x in random_rollout())
    end = np.arange(9) == 3
    together = gae(reward, value, next_value, **{kind: end})
    first = gae(reward[:4], value[:4], next_value[:4], **{kind: end[:4]})
    second = gae(reward[4:], value[4:], next_value[4:])
    np.testing.assert_array_equal(together, np.concatenate([first, second]))


def test_lambda_0_is_the_td_error():
    advantages = gae(REWARD, VALUE, NEXT_VALUE, terminated=[0, 1, 0], gae_lambda=0.0)
    np.testing.assert_allclose(advantages, [0.5, -1, 1.5])


def test_lambda_1_is_the_discounted_return_minus_the_value():
    # Consistent values (next_value[t] = value[t + 1]) telescope. Return: 1 + 0.5*2 + 0.25*3 = 2.75 to the terminal.
    advantages = gae(REWARD, VALUE, NEXT_VALUE, terminated=[0, 0, 1], gae_lambda=1.0)
    np.testing.assert_allclose(advantages, [2.75 - 2, (2 + 0.5 * 3) - 3, 3 - 4])


def test_gamma_and_lambda_weigh_what_they_should():
    # gamma 0.9: deltas 1 + 2.7 - 2 = 1.7, 2 + 3.6 - 3 = 2.6, 3 + 4.5 - 4 = 3.5; decay 0.9 * 0.8 = 0.72.
    advantages = gae(REWARD, VALUE, NEXT_VALUE, gamma=0.9, gae_lambda=0.8)
    np.testing.assert_allclose(advantages, [1.7 + 0.72 * (2.6 + 0.72 * 3.5), 2.6 + 0.72 * 3.5, 3.5], rtol=1e-6)


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(0.99, 0.95), (1.0, 1.0), (0.7, 0.3), (0.0, 0.5)])
def test_equals_the_sum_of_td_errors_written_out(gamma, gae_lambda):
    rollout = random_rollout(seed=1)
    actual = np.asarray(ops.gae(*rollout, gamma, gae_lambda))
    np.testing.assert_allclose(actual, slow_gae(*rollout, gamma, gae_lambda), rtol=1e-4, atol=1e-5)


def test_a_terminal_ignores_even_an_invalid_next_value():
    assert np.isfinite(gae(REWARD, VALUE, [3.0, np.nan, 5.0], terminated=[0, 1, 0])).all()


def test_environments_do_not_mix():
    reward, value, next_value, terminated, truncated = random_rollout(seed=2)
    together = gae(reward, value, next_value, terminated, truncated)
    for n in range(reward.shape[1]):
        alone = gae(reward[:, n], value[:, n], next_value[:, n], terminated[:, n], truncated[:, n])
        np.testing.assert_array_equal(together[:, n], alone)


def test_different_shapes_are_refused():
    with pytest.raises(AssertionError):
        ops.gae(jnp.zeros((3, 1)), jnp.zeros(3), jnp.zeros(3), jnp.zeros(3, bool), jnp.zeros(3, bool), 0.9, 0.9)


def test_standardize_by_hand():
    # Mean 2.5, population variance (2.25 + 0.25 + 0.25 + 2.25) / 4 = 1.25.
    expected = np.array([-1.5, -0.5, 0.5, 1.5]) / np.sqrt(1.25)
    np.testing.assert_allclose(ops.standardize(jnp.array([1.0, 2.0, 3.0, 4.0])), expected, rtol=1e-6)


def test_standardize_takes_one_mean_over_all_axes():
    x = jnp.asarray(np.random.default_rng(0).normal(3.0, 2.0, (6, 4)), jnp.float32)
    result = np.asarray(ops.standardize(x))
    np.testing.assert_allclose(result.mean(), 0.0, atol=1e-6)
    np.testing.assert_allclose(result.std(), 1.0, rtol=1e-5)
    assert abs(result.mean(axis=0)).max() > 1e-2


def test_standardize_of_one_sample_is_zero():
    np.testing.assert_array_equal(ops.standardize(jnp.array([3.7])), [0.0])


@pytest.mark.parametrize("value", [100.1, 0.1, -1e-8, 1e6, 0.0])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_standardize_of_equal_values_is_exactly_zero(value, transform):
    np.testing.assert_array_equal(transform(ops.standardize)(jnp.full(128, value, jnp.float32)), np.zeros(128))


def test_standardize_survives_a_large_offset():
    x = np.random.default_rng(0).integers(-8, 8, 256).astype(np.float32)
    expected = (x - x.mean()) / x.std()
    np.testing.assert_allclose(ops.standardize(jnp.asarray(x + 1e4)), expected, atol=1e-4)


def test_standardize_of_tiny_values_is_damped_by_eps():
    x = jnp.array([-1e-8, 1e-8])
    np.testing.assert_allclose(ops.standardize(x), [-0.5, 0.5], rtol=1e-3)


# Discounted sums. gamma 0.5: 1, 2 + 0.5*1 = 2.5 (its terminal reward kept), 3 (started again), 4 + 1.5 = 5.5.


def test_discounted_sums_keep_the_last_reward_and_start_again_after_it():
    reward, done = jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.array([False, True, False, False])
    sums, after = ops.discounted_sums(reward, done, jnp.zeros(()), 0.5)
    np.testing.assert_allclose(sums, [1, 2.5, 3, 5.5])
    np.testing.assert_allclose(after, 5.5)


def test_discounted_sums_go_on_from_rollout_to_rollout():
    rng = np.random.default_rng(0)
    reward, done = jnp.asarray(rng.normal(size=(9, 5)), jnp.float32), jnp.asarray(rng.random((9, 5)) < 0.3)
    whole, end = ops.discounted_sums(reward, done, jnp.zeros(5), 0.9)
    first, between = ops.discounted_sums(reward[:4], done[:4], jnp.zeros(5), 0.9)
    second, last = ops.discounted_sums(reward[4:], done[4:], between, 0.9)
    np.testing.assert_allclose(np.concatenate([first, second]), whole, rtol=1e-6)
    np.testing.assert_allclose(last, end, rtol=1e-6)


def test_a_rollout_that_ends_with_an_episode_starts_the_next_from_nothing():
    _, after = ops.discounted_sums(jnp.array([[1.0], [7.0]]), jnp.array([[False], [True]]), jnp.zeros(1), 0.9)
    np.testing.assert_array_equal(after, [0])
