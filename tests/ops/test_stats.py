"""Diagnostics by hand; running moments by hand and against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purejaxppo import ops


def test_explained_variance_of_a_perfect_critic_is_1():
    targets = jnp.array([1.0, 2.0, 4.0])
    assert ops.explained_variance(targets, targets) == 1.0


def test_explained_variance_of_a_constant_prediction_is_0():
    result = ops.explained_variance(jnp.full(3, 7.0), jnp.array([1.0, 2.0, 4.0]))
    np.testing.assert_allclose(result, 0.0, atol=1e-6)


def test_explained_variance_by_hand():
    # Targets 0, 2: variance 1. Errors 0.5, -0.5: variance 0.25.
    np.testing.assert_allclose(ops.explained_variance(jnp.array([-0.5, 2.5]), jnp.array([0.0, 2.0])), 0.75)


def test_explained_variance_of_a_critic_of_the_wrong_sign_is_negative():
    # Errors 2 * targets: variance four times theirs.
    np.testing.assert_allclose(ops.explained_variance(jnp.array([1.0, -1.0]), jnp.array([-1.0, 1.0])), -3.0)


def test_explained_variance_is_blind_to_a_constant_error():
    targets = jnp.array([1.0, 2.0, 4.0])
    np.testing.assert_allclose(ops.explained_variance(targets + 5.0, targets), 1.0, atol=1e-6)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
@pytest.mark.parametrize("value", [3.0, 0.0, 100.1, 1e6 / 3])
def test_explained_variance_of_equal_targets_is_nan(transform, value):
    assert np.isnan(transform(ops.explained_variance)(jnp.arange(128.0), jnp.full(128, value)))


def test_explained_variance_refuses_shapes_that_would_broadcast():
    with pytest.raises(AssertionError):
        ops.explained_variance(jnp.ones(3), jnp.ones((3, 1)))


def test_clip_fraction_marks_samples_on_both_sides_of_the_band():
    log_ratio = jnp.log(jnp.array([1.0, 1.19, 1.21, 0.81, 0.79, 3.0]))
    np.testing.assert_array_equal(ops.clip_fraction(log_ratio, 0.2), [0, 0, 1, 0, 1, 1])


def test_clip_fraction_without_a_band_is_zero():
    np.testing.assert_array_equal(ops.clip_fraction(jnp.array([50.0, -50.0, 1000.0]), jnp.inf), [0, 0, 0])


# Running moments


def merged(batches):
    return functools.reduce(ops.merge_moments, [ops.moments(jnp.asarray(batch, jnp.float32)) for batch in batches])


def test_moments_by_hand():
    stats = ops.moments(jnp.array([[1.0, 5.0], [3.0, 5.0]]))
    np.testing.assert_array_equal(stats.mean, [2, 5])
    np.testing.assert_array_equal(stats.m2, [2, 0])
    np.testing.assert_array_equal(stats.variance, [1, 0])
    # And four more, all 5: mean (2*2 + 4*5)/6 = 4, m2 = 2 + 9 * 2*4/6 = 14.
    stats = ops.merge_moments(stats, ops.moments(jnp.full((4, 2), 5.0)))
    np.testing.assert_allclose(stats.mean, [4, 5], rtol=1e-6)
    np.testing.assert_allclose(stats.m2, [14, 0], rtol=1e-6)
    assert stats.count == 6


@pytest.mark.parametrize("mean", [0.0, -3.0, 1e4])
def test_merged_moments_are_those_of_all_samples_in_any_order(mean):
    rng = np.random.default_rng(0)
    batches = [(mean + rng.normal(size=(size, 3)) * [1, 2, 5]).astype(np.float32) for size in (1, 7, 100, 33, 1)]
    everything = np.concatenate(batches).astype(np.float64)
    for order in (batches, batches[::-1], [batches[i] for i in (2, 0, 4, 1, 3)]):
        stats = merged(order)
        assert stats.count == len(everything)
        np.testing.assert_allclose(stats.mean, everything.mean(0), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(stats.variance, everything.var(0), rtol=2e-3)


@pytest.mark.parametrize("mean", [5.0, 1e4])
def test_a_thousand_merges_keep_three_digits(mean):
    """N(mean, 2), 512 samples at a time; the standard errors are 0.003 of the mean and 0.002 of the deviation."""

    def update(stats, key):
        samples = mean + 2.0 * jax.random.normal(key, (512,))
        return ops.merge_moments(stats, ops.moments(samples)), None

    keys = jax.random.split(jax.random.key(0), 1000)
    stats, _ = jax.jit(lambda keys: jax.lax.scan(update, ops.Moments(*jnp.zeros(3)), keys))(keys)
    assert stats.count == 512_000
    np.testing.assert_allclose(stats.mean, mean, atol=0.01)
    np.testing.assert_allclose(np.sqrt(stats.variance), 2.0, atol=0.01)


def test_moments_of_nothing_add_nothing():
    stats = ops.moments(jnp.array([1.0, 2.0, 6.0]))
    for both in ((stats, ops.Moments(*jnp.zeros(3))), (ops.Moments(*jnp.zeros(3)), stats)):
        np.testing.assert_allclose(ops.merge_moments(*both), stats, rtol=1e-6)


def test_standard_scores_by_hand_and_within_their_limit():
    stats = ops.Moments(jnp.array(4.0), jnp.array([1.0, 10.0]), jnp.array([16.0, 1.0]))
    scores = ops.standard_score(stats, jnp.array([[3.0, 10.5], [1.0, 9.0], [100.0, -100.0]]))
    np.testing.assert_allclose(scores, [[1, 1], [0, -2], [10, -10]], rtol=1e-6)
    constant = ops.moments(jnp.full((3, 1), 7.0))
    np.testing.assert_array_equal(ops.standard_score(constant, jnp.array([[7.0], [8.0]])), [[0], [10]])
