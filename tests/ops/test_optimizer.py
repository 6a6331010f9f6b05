"""Clipped Adam against optax's chain of the same transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from purejaxppo import ops


def steps(optimizer, grads):
    """Updates and states of one gradient after the other."""
    state, seen = optimizer.init(grads[0]), []
    for each in grads:
        updates, state = jax.jit(optimizer.update)(each, state)
        seen.append((updates, state))
    return seen


@pytest.mark.parametrize("max_grad_norm", [0.5, 1e3, np.inf])
@pytest.mark.parametrize("eps", [1e-8, 1e-5, 1e-1])
def test_it_is_optax_adam_on_clipped_gradients(max_grad_norm, eps):
    keys = jax.random.split(jax.random.key(0), 12)
    grads = [
        {"kernel": 10.0 ** (i % 4 - 3) * jax.random.normal(key, (5, 3)), "bias": jax.random.normal(key, (3,))}
        for i, key in enumerate(keys)
    ]
    expected = optax.chain(
        optax.clip_by_global_norm(max_grad_norm), optax.scale_by_adam(eps=eps), optax.scale_by_learning_rate(0.1)
    )
    for ours, theirs in zip(
        steps(ops.clipped_adam(0.1, max_grad_norm, eps), grads), steps(expected, grads), strict=True
    ):
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-9)


def test_the_first_step_is_the_learning_rate_whatever_the_gradient():
    updates, _ = ops.clipped_adam(0.1, np.inf, 0.0).update(
        jnp.array([1e-3, -5.0]), ops.clipped_adam(0.1, np.inf, 0.0).init(jnp.zeros(2))
    )
    np.testing.assert_allclose(updates, [-0.1, 0.1], rtol=2e-5)


def test_a_gradient_that_is_no_number_is_seen():
    optimizer = ops.clipped_adam(0.1, 0.5, 1e-5)
    updates, _ = optimizer.update(jnp.array([jnp.nan, 1.0]), optimizer.init(jnp.zeros(2)))
    assert np.isnan(updates).all()
