"""What the actor and the critic compute and share, for vectors, images and masked actions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.signal

import purejaxppo as ppo
from purejaxppo.agent import distributions, envs, networks
from tests.helpers import tiny


@functools.cache
def network(shared_trunk=False, activation="tanh", hidden_sizes=(16, 16)):
    module = networks.ActorCritic(hidden_sizes, activation, shared_trunk, distributions.Categorical(3))
    obs = jax.random.normal(jax.random.key(1), (32, 4))
    return module, jax.jit(module.init)(jax.random.key(0), obs), obs


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
    probabilities = jax.nn.softmax(networks.policy(module, params, obs))
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


# Images


@functools.cache
def convolutional(shared_trunk=False):
    config = tiny(env="Breakout-MinAtar", network="cnn", shared_trunk=shared_trunk, activation="relu")
    module = networks.make(config, envs.make(config.env))
    obs = jax.random.bernoulli(jax.random.key(1), 0.3, (5, 400)).astype(jnp.float32)
    return module, jax.jit(module.init)(jax.random.key(0), obs), obs


def test_the_convolution_is_the_documented_function():
    """Against a convolution of scipy, filter by filter."""
    module, params, obs = convolutional()
    leaves = jax.tree.map(lambda x: np.asarray(x, np.float64), params["params"])
    trunk, head = leaves["critic_trunk"], leaves["critic_head"]
    filters = trunk["Dense_0"]["kernel"].reshape(3, 3, 4, 16)
    for image, value in zip(np.asarray(obs).reshape(5, 10, 10, 4), networks.value(module, params, obs), strict=True):
        planes = [
            sum(scipy.signal.correlate2d(image[..., c], filters[:, :, c, f], mode="valid") for c in range(4))
            for f in range(16)
        ]
        features = np.maximum(np.stack(planes, -1) + trunk["Dense_0"]["bias"], 0).ravel()
        hidden = trunk["Trunk_0"]["Dense_0"]
        features = np.maximum(features @ hidden["kernel"] + hidden["bias"], 0)
        np.testing.assert_allclose(value, (features @ head["kernel"] + head["bias"])[0], rtol=1e-4, atol=1e-5)


def test_the_convolution_looks_at_every_axis():
    """A single pixel moved by one in height, width or channel is another image."""
    module, params, _ = convolutional()
    pixels = [(4, 4, 0), (5, 4, 0), (4, 5, 0), (4, 4, 1)]
    images = jnp.stack([jnp.zeros((10, 10, 4)).at[pixel].set(1.0).reshape(-1) for pixel in pixels])
    assert len(np.unique(np.asarray(networks.value(module, params, images)).round(6))) == 4


def test_a_shared_trunk_of_images_is_one_set_of_parameters():
    assert set(convolutional(True)[1]["params"]) == {"actor_trunk", "actor_head", "critic_head"}
    assert set(convolutional()[1]["params"]) == {"actor_trunk", "actor_head", "critic_trunk", "critic_head"}


def test_a_board_is_an_image_of_one_channel():
    assert networks.make(tiny(env="Catch-bsuite", network="cnn"), envs.make("Catch-bsuite")).image_shape == (10, 5, 1)


@pytest.mark.parametrize(("env", "shape"), [("CartPole-v1", r"\(4,\)"), ("FrozenLake-misc", r"\(16,\)")])
def test_a_convolution_of_a_vector_is_refused(env, shape):
    with pytest.raises(
        ValueError, match=rf"^config\.network = 'cnn': observations of {env} have shape {shape}; allowed"
    ):
        networks.make(tiny(env=env, network="cnn"), envs.make(env))


# Action masks


@functools.cache
def masked():
    config = tiny(env="Masked-test", normalize_observations=True, kl_penalty=True, num_envs=16, total_timesteps=5 * 128)
    env = envs.make(config.env)
    network = networks.make(config, env)
    start = jax.jit(functools.partial(ppo.init, config))(ppo.HParams(), jax.random.key(0))
    return config, env, network, start


def test_a_forbidden_action_has_no_probability_and_is_never_sampled():
    _, _, network, state = masked()
    obs = jnp.tile(jnp.array([[101.0, 1, 1, 0], [99.0, 0, 1, 1]]), (500, 1))
    noise = network.actions.draw_noise(jax.random.key(1), (1000,))
    dist_params, action, _ = networks.act(network, state.params, state.obs_stats, obs, noise)
    policy = network.actions.distribution(dist_params)
    np.testing.assert_array_equal(jax.nn.softmax(dist_params)[:2] > 0, [[1, 1, 0], [0, 1, 1]])
    np.testing.assert_allclose(policy.entropy(), np.log(2), atol=0.01)
    assert set(np.unique(action[::2])) == {0, 1}
    assert set(np.unique(action[1::2])) == {1, 2}


def test_the_mask_is_neither_normalised_nor_an_input():
    _, _, network, state = masked()
    assert state.obs_stats.mean.shape == (1,)
    obs = jnp.array([[101.0, 1, 1, 0], [101.0, 0, 1, 1]])
    seen = networks.normalize(state.obs_stats, obs)
    np.testing.assert_array_equal(seen[:, 1:], obs[:, 1:])
    np.testing.assert_allclose(seen[:, 0], (101.0 - state.obs_stats.mean[0]) / np.sqrt(state.obs_stats.variance[0]))
    np.testing.assert_array_equal(*networks.value(network, state.params, seen))


@pytest.mark.slow
def test_a_masked_run_is_finite_and_learns_the_best_allowed_action():
    config, _, network, _ = masked()
    config = dataclasses.replace(config, total_timesteps=40 * 128)
    hparams = ppo.HParams(learning_rate=0.02, ent_coef=0.01, kl_coef=0.1)
    state, metrics = jax.jit(functools.partial(ppo.train, config))(hparams, jax.random.key(0))
    assert metrics.all_finite.all()
    obs = jnp.array([[101.0, 1, 1, 0], [99.0, 0, 1, 1]])
    _, action, _ = networks.act(network, state.params, state.obs_stats, obs, jnp.zeros((2, 3)))
    np.testing.assert_array_equal(action, [1, 2])
    assert (metrics.episode_return >= 0).all()  # a forbidden action would have cost 100
