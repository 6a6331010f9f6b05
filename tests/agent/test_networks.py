"""The initialiser, the sampler, and what the actor and the critic share."""

import functools

import jax
import numpy as np
import pytest

from purejaxppo.agent import distributions, networks


@functools.cache
def network(shared_trunk=False, activation="tanh", hidden_sizes=(16, 16)):
    module = networks.ActorCritic(hidden_sizes, activation, shared_trunk, distributions.Categorical(3))
    obs = jax.random.normal(jax.random.key(1), (32, 4))
    return module, jax.jit(module.init)(jax.random.key(0), obs), obs


@pytest.mark.parametrize("scale", [1.0, 2**0.5, 0.01])
@pytest.mark.parametrize("shape", [(4, 64), (64, 64), (64, 2), (400, 64), (1, 16), (64, 1)])
def test_orthogonal_matrices_are_orthogonal(shape, scale):
    matrix = np.asarray(networks.orthogonal(scale)(jax.random.key(0), shape), np.float64)
    assert matrix.shape == shape
    gram = matrix @ matrix.T if shape[0] <= shape[1] else matrix.T @ matrix
    np.testing.assert_allclose(gram / scale**2, np.eye(min(shape)), atol=1e-5)


def test_orthogonal_matrices_are_spread_over_both_determinants_and_all_entries():
    keys = jax.random.split(jax.random.key(0), 400)
    matrices = np.asarray(jax.jit(jax.vmap(lambda key: networks.orthogonal(1.0)(key, (3, 3))))(keys), np.float64)
    determinants = np.linalg.det(matrices)
    np.testing.assert_allclose(np.abs(determinants), 1.0, atol=1e-5)
    # 400 fair coins: standard deviation 10.
    assert 150 < (determinants > 0).sum() < 250
    assert ((matrices > 0).sum(0) > 150).all()
    assert ((matrices > 0).sum(0) < 250).all()
    # Uniform over the rotations: every entry has mean 0 and second moment 1/3 (standard error about 0.015).
    np.testing.assert_allclose(matrices.mean(0), 0.0, atol=0.12)
    np.testing.assert_allclose((matrices**2).mean(0), 1 / 3, atol=0.07)


def test_the_initialiser_gives_a_run_in_a_batch_what_it_gives_alone():
    keys = jax.random.split(jax.random.key(0), 5)
    init = lambda key: networks.orthogonal(1.0)(key, (8, 16))  # noqa: E731
    together = jax.jit(jax.vmap(init))(keys)
    alone = jax.jit(init)
    for i in range(5):
        np.testing.assert_allclose(together[i], alone(keys[i]), atol=1e-6)
    assert not np.allclose(together[0], together[1], atol=0.1)


def test_layers_have_their_scales_and_zero_biases():
    _, params, _ = network()
    params = params["params"]
    scales = {
        ("actor_trunk", "Dense_0"): 2**0.5,
        ("actor_trunk", "Dense_1"): 2**0.5,
        ("critic_trunk", "Dense_0"): 2**0.5,
        ("critic_trunk", "Dense_1"): 2**0.5,
        ("actor_head",): 0.01,
        ("critic_head",): 1.0,
    }
    for path, scale in scales.items():
        layer = params
        for name in path:
            layer = layer[name]
        singular = np.linalg.svd(np.asarray(layer["kernel"]), compute_uv=False)
        np.testing.assert_allclose(singular, scale, rtol=1e-4)
        np.testing.assert_array_equal(layer["bias"], np.zeros_like(layer["bias"]))


def test_the_first_policy_is_nearly_uniform():
    module, params, obs = network()
    probabilities = distributions.Categorical(3).distribution(networks.policy(module, params, obs)).probs
    np.testing.assert_allclose(probabilities, 1 / 3, atol=0.02)
    assert np.ptp(np.asarray(probabilities)) > 0


def test_shapes_follow_the_observations():
    module, params, obs = network()
    assert networks.policy(module, params, obs.reshape(2, 16, 4)).shape == (2, 16, 3)
    assert networks.value(module, params, obs.reshape(2, 16, 4)).shape == (2, 16)
    assert networks.value(module, params, obs[0]).shape == ()


def test_a_shared_trunk_is_one_set_of_parameters():
    _, apart, _ = network(shared_trunk=False)
    _, shared, _ = network(shared_trunk=True)
    assert set(apart["params"]) == {"actor_trunk", "critic_trunk", "actor_head", "critic_head"}
    assert set(shared["params"]) == {"actor_trunk", "actor_head", "critic_head"}


@pytest.mark.parametrize("shared_trunk", [False, True])
def test_the_value_depends_on_the_actors_trunk_only_if_it_is_shared(shared_trunk):
    module, params, obs = network(shared_trunk)
    gradient = jax.grad(lambda params: networks.value(module, params, obs).sum())(params)["params"]["actor_trunk"]
    assert any(np.asarray(leaf).any() for leaf in jax.tree.leaves(gradient)) == shared_trunk


def test_the_networks_are_the_documented_function():
    module, params, obs = network(activation="relu", hidden_sizes=(5,))
    trunk, head = params["params"]["critic_trunk"]["Dense_0"], params["params"]["critic_head"]
    hidden = np.maximum(np.asarray(obs) @ np.asarray(trunk["kernel"]), 0.0)
    expected = (hidden @ np.asarray(head["kernel"]))[:, 0]
    np.testing.assert_allclose(networks.value(module, params, obs), expected, rtol=1e-4, atol=1e-5)
