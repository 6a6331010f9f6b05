"""Diagnostics by hand."""

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
