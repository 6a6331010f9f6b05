"""The KL and its estimators on (0.5, 0.3, 0.2) -> (0.4, 0.4, 0.2), whose KL is 0.02527; and the coefficient's rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

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


# Exact KL of categorical policies

INF, NAN = float("inf"), float("nan")


def test_the_kl_has_a_direction():
    old, new = jnp.log(OLD), jnp.log(NEW)
    np.testing.assert_allclose(ops.kl_categorical(old, new), 0.02527, atol=5e-6)
    np.testing.assert_allclose(ops.kl_categorical(new, old), 0.02582, atol=5e-6)


def test_the_quadratic_model_of_the_kl():
    np.testing.assert_allclose(0.5 * np.sum((NEW - OLD) ** 2 / OLD), 0.02667, atol=5e-6)


def test_the_kl_ignores_a_constant_in_the_logits_and_keeps_the_batch():
    old, new = jnp.log(OLD), jnp.log(NEW)
    kl = ops.kl_categorical(jnp.stack([old, old + 100, new]), jnp.stack([new - 50, new, new + 3]))
    np.testing.assert_allclose(kl, [0.02527, 0.02527, 0.0], atol=2e-5)


def test_the_kl_to_itself_is_zero_and_stationary():
    value, gradient = jax.value_and_grad(lambda new: ops.kl_categorical(jnp.log(OLD), new))(jnp.log(OLD))
    np.testing.assert_allclose(value, 0.0, atol=1e-7)
    np.testing.assert_allclose(gradient, np.zeros(3), atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_the_kl_of_categorical_policies_against_scipy(seed):
    logits = np.random.default_rng(seed).normal(scale=3, size=(2, 5, 7))
    probs = scipy.special.softmax(logits, axis=-1)
    expected = scipy.special.rel_entr(probs[0], probs[1]).sum(-1)
    np.testing.assert_allclose(ops.kl_categorical(*jnp.asarray(logits, jnp.float32)), expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ([0.0, -1000.0], [0.0, 0.0], np.log(2)),
        ([0.0, -1000.0], [-1000.0, 0.0], 1000.0),
        ([0.0, 0.0], [0.0, -1000.0], 500 - np.log(2)),
        ([0.0, -1000.0], [0.0, -1000.0], 0.0),
        ([0.0, -INF], [0.0, -INF], 0.0),
        ([0.0, -INF], [0.0, 0.0], np.log(2)),
        ([0.0, -1000.0], [0.0, -INF], 0.0),
    ],
)
def test_actions_that_are_never_taken_give_a_finite_kl_and_gradient(old, new, expected):
    value, gradients = jax.value_and_grad(ops.kl_categorical, argnums=(0, 1))(jnp.array(old), jnp.array(new))
    np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-6)
    assert np.isfinite(gradients).all()


def test_an_action_that_only_the_new_policy_cannot_take_is_infinitely_far():
    assert ops.kl_categorical(jnp.zeros(2), jnp.array([0.0, -INF])) == INF


def test_the_hessian_of_the_kl_is_finite_where_probabilities_underflow():
    logits = jnp.array([0.0, -1000.0, -3.0])
    assert np.isfinite(jax.hessian(lambda new: ops.kl_categorical(logits, new))(logits)).all()


# Exact KL of normal policies


def kl_by_quadrature(old_mean, old_log_std, new_mean, new_log_std):
    """E_old[log p_old - log p_new] in float64, exact: the integrand is quadratic."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(4)
    actions = old_mean + np.exp(old_log_std) * nodes[:, None, None]
    old = scipy.stats.norm.logpdf(actions, old_mean, np.exp(old_log_std))
    new = scipy.stats.norm.logpdf(actions, new_mean, np.exp(new_log_std))
    return np.tensordot(weights / weights.sum(), old - new, 1).sum(-1)


@pytest.mark.parametrize("seed", range(3))
def test_the_kl_of_normal_policies_in_both_directions(seed):
    old_mean, old_log_std, new_mean, new_log_std = np.random.default_rng(seed).normal(size=(4, 5, 3))
    forward = (old_mean, old_log_std, new_mean, new_log_std)
    reverse = (new_mean, new_log_std, old_mean, old_log_std)
    for arguments in (forward, reverse):
        actual = ops.kl_normal(*(jnp.asarray(x, jnp.float32) for x in arguments))
        assert actual.shape == (5,)
        np.testing.assert_allclose(actual, kl_by_quadrature(*arguments), rtol=1e-4)
    assert np.abs(kl_by_quadrature(*forward) - kl_by_quadrature(*reverse)).max() > 0.1


def test_the_kl_of_normal_policies_by_hand():
    one, zero = jnp.ones(1), jnp.zeros(1)
    np.testing.assert_allclose(ops.kl_normal(zero, zero, one, zero), 0.5)
    np.testing.assert_allclose(ops.kl_normal(zero, zero, zero, jnp.log(2 * one)), np.log(2) + 1 / 8 - 1 / 2, rtol=1e-6)
    np.testing.assert_allclose(ops.kl_normal(zero, jnp.log(2 * one), zero, zero), -np.log(2) + 2 - 1 / 2, rtol=1e-6)
    np.testing.assert_allclose(ops.kl_normal(zero, zero, zero, jnp.full(1, 1e-3)), 1e-6, rtol=2e-3)  # no cancellation


@pytest.mark.parametrize("old_log_std", [-20.0, 0.0, 20.0])
@pytest.mark.parametrize("new_log_std", [-20.0, 0.0, 20.0])
def test_extreme_scales_give_a_finite_kl_and_gradient(old_log_std, new_log_std):
    arguments = [jnp.array([x]) for x in (0.3, old_log_std, -0.4, new_log_std)]
    value, gradients = jax.value_and_grad(ops.kl_normal, argnums=(0, 1, 2, 3))(*arguments)
    assert np.isfinite(value)
    assert value >= 0
    assert np.isfinite(gradients).all()


# The adaptive coefficient


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (10.0, 0.2),
        (2.0, 0.05),
        (6.0, 0.1),
        (4.0, 0.1),  # exactly target / 1.5
        (9.0, 0.1),  # exactly 1.5 * target
        (np.nextafter(np.float32(4), np.float32(0)), 0.05),
        (np.nextafter(np.float32(9), np.float32(10)), 0.2),
        (0.0, 0.05),
        (INF, 0.2),
        (NAN, 0.2),
    ],
)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_the_coefficient_follows_the_kl(kl, expected, transform):
    coefficient = transform(ops.adapt_kl_coef)(jnp.float32(0.1), jnp.float32(kl), jnp.float32(6.0), jnp.float32(2.0))
    np.testing.assert_allclose(coefficient, expected, rtol=1e-6)


@pytest.mark.parametrize("kl", [0.0, 0.01, 1.0, INF, NAN])
@pytest.mark.parametrize("coefficient", [0.0, 1e-30, 1e-6, 0.37, 1e6, 1e30])
def test_factor_1_keeps_any_coefficient(coefficient, kl):
    assert ops.adapt_kl_coef(jnp.float32(coefficient), jnp.float32(kl), 0.01, 1.0) == np.float32(coefficient)


@pytest.mark.parametrize("kl", [0.0, 0.01, 1.0, INF, NAN])
def test_coefficient_0_stays_0(kl):
    assert ops.adapt_kl_coef(jnp.zeros(()), jnp.float32(kl), 0.01, 2.0) == 0


@pytest.mark.parametrize("factor", [2.0, 1.5, 1e30])
@pytest.mark.parametrize(("kl", "bound"), [(1.0, 1e6), (NAN, 1e6), (0.0, 1e-6)])
def test_the_coefficient_stays_finite_and_positive_for_ever_and_comes_back(kl, bound, factor):
    def repeat(coefficient, kl, times):
        for _ in range(times):
            coefficient = ops.adapt_kl_coef(coefficient, jnp.float32(kl), 0.01, factor)
        return coefficient

    stuck = repeat(jnp.float32(0.1), kl, 200)
    np.testing.assert_allclose(stuck, bound, rtol=1e-6)
    back = repeat(stuck, 0.0 if bound > 1 else 1.0, 1)
    assert (back < stuck) if bound > 1 else (back > stuck)


def test_each_lane_adapts_on_its_own():
    kl = jnp.array([1.0, 0.01, 0.0, NAN])
    adapted = jax.vmap(ops.adapt_kl_coef, (None, 0, None, None))(jnp.float32(0.1), kl, 0.01, 3.0)
    np.testing.assert_allclose(adapted, [0.3, 0.1, 0.1 / 3, 0.3], rtol=1e-6)
