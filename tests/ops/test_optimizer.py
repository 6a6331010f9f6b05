"""Clipped Adam against optax's chain of the same transformations."""

import chex
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


LAYERS = {
    "head": {"bias": np.float32([1.0]), "kernel": np.float32([[2.0], [3.0]])},
    "hidden": {"bias": np.float32([4.0, 5.0]), "kernel": np.arange(6, dtype=np.float32).reshape(3, 2)},
}


def test_packing_gathers_small_leaves_by_hand():
    packing = ops.Packing(LAYERS, limit=2)
    vector, large = packing.pack(LAYERS)
    np.testing.assert_array_equal(vector, [1, 2, 3, 4, 5])
    assert [leaf.shape for leaf in large] == [(3, 2)]
    chex.assert_trees_all_equal(packing.unpack((vector, large)), LAYERS)


@pytest.mark.parametrize("limit", [0, 1, 2, 6, 1000])
def test_packing_changes_no_bit(limit):
    packing = ops.Packing(LAYERS, limit)
    chex.assert_trees_all_equal(packing.unpack(packing.pack(LAYERS)), LAYERS)
    state = ops.clipped_adam(1e-3, 0.5, 1e-5).init(LAYERS)
    packed = packing.pack_all(state)
    chex.assert_trees_all_equal_structs(packed[1].mu, packing.pack(LAYERS))
    chex.assert_trees_all_equal(packing.unpack_all(packed), state)


@pytest.mark.parametrize("max_grad_norm", [0.5, np.inf])
def test_packed_parameters_learn_as_any(max_grad_norm):
    """The norm of the gradients is summed in another order, and nothing else differs."""
    optimizer, packing = ops.clipped_adam(1e-2, max_grad_norm, 1e-5), ops.Packing(LAYERS, limit=2)
    params, state = LAYERS, optimizer.init(LAYERS)
    packed, packed_state = packing.pack(params), packing.pack_all(state)
    for seed in range(3):
        grads = jax.tree.map(lambda x, seed=seed: np.float32(np.cos(seed + x)), LAYERS)
        updates, state = optimizer.update(grads, state)
        params = optax.apply_updates(params, updates)
        updates, packed_state = optimizer.update(packing.pack(grads), packed_state)
        packed = optax.apply_updates(packed, updates)
    chex.assert_trees_all_close(packing.unpack(packed), params, rtol=1e-6)
    chex.assert_trees_all_close(packing.unpack_all(packed_state), state, rtol=1e-6)


def test_packing_of_runs_side_by_side():
    runs = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), LAYERS)

    def twice(tree):
        packing = ops.Packing(tree, limit=2)
        return packing.unpack(jax.tree.map(lambda x: 2 * x, packing.pack(tree)))

    chex.assert_trees_all_equal(jax.jit(jax.vmap(twice))(runs), jax.tree.map(lambda x: 2 * x, runs))
