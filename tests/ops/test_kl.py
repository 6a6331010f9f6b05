"""The KL estimators on (0.5, 0.3, 0.2) -> (0.4, 0.4, 0.2), whose KL is 0.02527."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purejaxppo import ops

OLD, NEW = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
LOG_RATIO = jnp.asarray(np.log(NEW / OLD), jnp.float32)


def test_k1_per_action():
    np.testing.assert_allclose(ops.kl_k1(LOG_RATIO), [0.2231, -0.2877, 0.0], atol=5e-5)


def test_k2_per_action():
    np.testing.assert_allclose(ops.kl_k2(LOG_RATIO), [0.2231**2 / 2, 0.2877**2 / 2, 0.0], atol=5e-5)


def test_k3_per_action():
    np.testing.assert_allclose(ops.kl_k3(LOG_RATIO), [0.0231, 0.0457, 0.0], atol=5e-5)


@pytest.mark.parametrize("estimator", [ops.kl_k1, ops.kl_k3])
def test_k1_and_k3_average_to_the_kl(estimator):
    np.testing.assert_allclose(np.sum(OLD * np.asarray(estimator(LOG_RATIO))), 0.02527, atol=5e-6)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_k3_is_never_negative(transform):
    magnitudes = np.logspace(-12, 1.9, 4001)
    log_ratio = jnp.asarray(np.concatenate([-magnitudes, [0.0], magnitudes]), jnp.float32)
    values = np.asarray(transform(ops.kl_k3)(log_ratio))
    assert (values >= 0).all(), values.min()


def test_k3_of_a_small_ratio_change_is_its_half_square():
    np.testing.assert_allclose(ops.kl_k3(jnp.array([1e-3, -1e-3])), 5e-7, rtol=2e-3)


@pytest.mark.parametrize("estimator", [ops.kl_k1, ops.kl_k2, ops.kl_k3])
def test_an_extinct_action_gives_a_finite_estimate_and_gradient(estimator):
    value, gradient = jax.value_and_grad(estimator)(jnp.array(-1000.0))
    assert np.isfinite([value, gradient]).all()
    assert value >= 999.0


@pytest.mark.parametrize("estimator", [ops.kl_k1, ops.kl_k2, ops.kl_k3])
def test_estimators_are_zero_at_the_rollout_policy_and_per_element(estimator):
    np.testing.assert_array_equal(estimator(jnp.zeros((2, 3))), np.zeros((2, 3)))
