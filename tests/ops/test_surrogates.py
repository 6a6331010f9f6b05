"""The surrogates and value losses: hand-computed rows, slopes by automatic differentiation, and limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purejaxppo import ops

# (eps, advantage, ratio, term, slope with respect to the ratio)
CLIP_ROWS = [
    (0.2, 2.0, 1.1, 2.2, 2.0),
    (0.2, 2.0, 1.5, 2.4, 0.0),
    (0.2, 2.0, 0.5, 1.0, 2.0),
    (0.2, -1.0, 0.9, -0.9, -1.0),
    (0.2, -1.0, 0.6, -0.8, 0.0),
    (0.2, -1.0, 1.4, -1.4, -1.0),
    (0.1, 1.0, 1.05, 1.05, 1.0),
    (0.1, 1.0, 1.25, 1.10, 0.0),
    (0.1, 1.0, 0.7, 0.70, 1.0),
    (0.1, -2.0, 1.3, -2.60, -2.0),
    (0.1, -2.0, 0.85, -1.80, 0.0),
    (0.1, -2.0, 0.95, -1.90, -2.0),
    # Old probability 0.4, new 0.6.
    (0.2, 2.0, 0.6 / 0.4, 2.4, 0.0),
    (0.2, -2.0, 0.6 / 0.4, -3.0, -2.0),
    # At the rollout policy: the advantage, with its full slope.
    (0.2, 2.0, 1.0, 2.0, 2.0),
    (0.2, -2.0, 1.0, -2.0, -2.0),
]


@pytest.mark.parametrize(("eps", "advantage", "ratio", "term", "slope"), CLIP_ROWS)
def test_clipped_surrogate_row(eps, advantage, ratio, term, slope):
    def of_ratio(ratio):
        return ops.clipped_surrogate(jnp.log(ratio), jnp.asarray(advantage), eps)

    value, gradient = jax.value_and_grad(of_ratio)(jnp.asarray(ratio))
    np.testing.assert_allclose([value, gradient], [term, slope], rtol=1e-5)


def random_inputs(num=1000):
    log_ratio, advantages = np.random.default_rng(0).normal(size=(2, num)).astype(np.float32)
    return jnp.asarray(log_ratio), jnp.asarray(advantages)


def test_clipped_surrogate_never_exceeds_the_unclipped_one():
    log_ratio, advantages = random_inputs()
    clipped = ops.clipped_surrogate(log_ratio, advantages, 0.2)
    plain = ops.surrogate(log_ratio, advantages)
    assert (clipped <= plain).all()
    assert (clipped < plain).mean() > 0.2


def test_infinite_clip_eps_is_the_surrogate_bitwise():
    inputs = random_inputs()

    def value_and_gradient(term):
        return jax.vjp(term, *inputs)[0], jax.vjp(term, *inputs)[1](jnp.ones(1000))

    clipped = value_and_gradient(lambda *x: ops.clipped_surrogate(*x, jnp.inf))
    plain = value_and_gradient(ops.surrogate)
    jax.tree.map(np.testing.assert_array_equal, clipped, plain)


def test_surrogate_by_hand():
    log_ratio, advantages = jnp.log(jnp.array([2.0, 0.5])), jnp.array([3.0, -4.0])
    np.testing.assert_allclose(ops.surrogate(log_ratio, advantages), [6.0, -2.0], rtol=1e-6)


def test_surrogate_at_the_rollout_policy_has_the_policy_gradient():
    """Softmax over three arms: the gradient of mean(ratio * A) is the mean of A * (onehot - pi)."""
    logits = jnp.array([0.3, -0.2, 0.1])
    actions, advantages = jnp.array([0, 1, 1, 2]), jnp.array([0.5, 1.5, 0.5, -2.5])

    def objective(new):
        log_ratio = jax.nn.log_softmax(new)[actions] - jax.nn.log_softmax(logits)[actions]
        return ops.surrogate(log_ratio, advantages).mean()

    value, gradient = jax.value_and_grad(objective)(logits)
    expected = (advantages[:, None] * (jax.nn.one_hot(actions, 3) - jax.nn.softmax(logits))).mean(0)
    np.testing.assert_allclose(value, advantages.mean(), atol=1e-6)
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_surrogates_of_an_extinct_action_are_zero_with_finite_gradient():
    for term in (ops.surrogate, lambda *x: ops.clipped_surrogate(*x, 0.2)):
        value, gradient = jax.value_and_grad(term)(jnp.array(-1000.0), jnp.array(2.0))
        np.testing.assert_array_equal([value, gradient], [0.0, 0.0])


def test_value_loss_is_half_the_squared_error():
    np.testing.assert_allclose(ops.value_loss(jnp.array([1.0, 5.0]), jnp.array([3.0, 4.0])), [2.0, 0.5])


# (value, old value, target, eps, loss, slope): the larger of the plain and the clipped loss.
VALUE_ROWS = [
    (1.1, 1.0, 3.0, 0.2, 0.5 * 1.9**2, -1.9),  # inside the band
    (2.0, 1.0, 3.0, 0.2, 0.5 * 1.8**2, 0.0),  # ran towards the target beyond the band: clipped at 1.2, no slope
    (0.0, 1.0, 3.0, 0.2, 0.5 * 3.0**2, -3.0),  # ran away from the target: the plain loss
    (5.0, 1.0, 3.0, 0.2, 0.5 * 2.0**2, 2.0),  # overshot further than the clipped value falls short
    (-1.0, 0.0, -3.0, 0.5, 0.5 * 2.5**2, 0.0),  # clipped from below, at -0.5
]


@pytest.mark.parametrize(("value", "old_value", "target", "eps", "loss", "slope"), VALUE_ROWS)
def test_clipped_value_loss_row(value, old_value, target, eps, loss, slope):
    actual = jax.value_and_grad(ops.clipped_value_loss)(
        jnp.asarray(value), jnp.asarray(old_value), jnp.asarray(target), eps
    )
    np.testing.assert_allclose(actual, [loss, slope], rtol=1e-5, atol=1e-7)


def test_infinite_value_clip_eps_is_the_value_loss_bitwise():
    value, old_value, targets = jnp.asarray(np.random.default_rng(0).normal(size=(3, 1000)), jnp.float32)

    def clipped(value):
        return ops.clipped_value_loss(value, old_value, targets, jnp.inf)

    np.testing.assert_array_equal(clipped(value), ops.value_loss(value, targets))
    np.testing.assert_array_equal(
        jax.grad(lambda v: clipped(v).sum())(value), jax.grad(lambda v: ops.value_loss(v, targets).sum())(value)
    )


def test_terms_are_per_element():
    ones = jnp.ones((3, 4))
    assert ops.surrogate(ones, ones).shape == (3, 4)
    assert ops.clipped_surrogate(ones, ones, 0.2).shape == (3, 4)
    assert ops.value_loss(ones, ones).shape == (3, 4)
    assert ops.clipped_value_loss(ones, ones, ones, 0.2).shape == (3, 4)


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: ops.surrogate(a, b),
        lambda a, b: ops.clipped_surrogate(a, b, 0.2),
        lambda a, b: ops.value_loss(a, b),
        lambda a, b: ops.clipped_value_loss(a, b, a, 0.2),
        lambda a, b: ops.clipped_value_loss(a, a, b, 0.2),
    ],
)
def test_shapes_that_would_broadcast_are_refused(call):
    with pytest.raises(AssertionError):
        call(jnp.ones(3), jnp.ones((3, 1)))
