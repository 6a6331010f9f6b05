"""Sums and log-probabilities over few choices, taken one by one, and over many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purejaxppo import ops

SIZES = [1, 2, 3, 4, 5, 9]


def random(size, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(3, 5, size)) * 3, jnp.float32)


def test_hand_computed():
    np.testing.assert_allclose(ops.log_softmax(jnp.log(jnp.array([1.0, 3.0]))), np.log([0.25, 0.75]), rtol=1e-6)
    np.testing.assert_array_equal(ops.sum_choices(jnp.array([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])), [7, 56])


@pytest.mark.parametrize("size", SIZES)
def test_values_and_derivatives_are_those_of_whole_rows(size):
    x, weights = random(size), random(size, seed=1)
    np.testing.assert_allclose(ops.sum_choices(x), x.sum(-1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ops.log_softmax(x), jax.nn.log_softmax(x), rtol=1e-5, atol=1e-6)
    for ours, theirs in ((ops.log_softmax, jax.nn.log_softmax), (ops.sum_choices, lambda x: jnp.sum(x, axis=-1))):
        for derivative in (jax.grad, jax.hessian, lambda f: jax.jacfwd(jax.jacfwd(f))):
            actual, expected = (
                derivative(lambda x, f=f: jnp.sum(f(x * weights[0]) ** 2) / 100)(x[0]) for f in (ours, theirs)
            )
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", SIZES)
def test_large_logits_do_not_overflow(size):
    np.testing.assert_allclose(jnp.exp(ops.log_softmax(random(size) + 1e4)).sum(-1), 1.0, rtol=1e-5)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_what_is_never_chosen_has_probability_0_and_disturbs_no_gradient(size):
    logits = jnp.zeros(size).at[0].set(-jnp.inf)
    log_probs = ops.log_softmax(logits)
    assert log_probs[0] == -jnp.inf
    np.testing.assert_allclose(log_probs[1:], -np.log(size - 1), rtol=1e-6, atol=1e-7)
    gradient = jax.grad(lambda logits: ops.log_softmax(logits)[1])(logits)
    expected = np.where(np.arange(size) == 1, 1.0, 0.0) - np.where(np.arange(size) == 0, 0.0, 1 / (size - 1))
    np.testing.assert_allclose(gradient, expected, atol=1e-6)
