"""PPO learns the probe environments, every seed: which probe fails tells which part is broken."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purejaxppo as ppo
from purejaxppo.agent import envs, networks

NUM_SEEDS = 4
GAMMA = 0.9
HPARAMS = ppo.HParams(learning_rate=1e-2, gamma=GAMMA, gae_lambda=0.95, max_grad_norm=10.0)


def learned(env, obs, hparams=HPARAMS, num_updates=60, **changes):
    """Values and probabilities of action 1 at the observations [O] after training: [seeds, observations]."""
    sizes = {"num_envs": 8, "num_steps": 8, "num_epochs": 4, "num_minibatches": 2, "hidden_sizes": (16,)}
    config = ppo.Config(env=env, total_timesteps=num_updates * 64, **sizes | changes)
    keys = jax.random.split(jax.random.key(0), NUM_SEEDS)
    state, metrics = jax.jit(jax.vmap(functools.partial(ppo.train, config), (None, 0)))(hparams, keys)
    assert metrics.all_finite.all()
    network = networks.make(config, envs.make(env))
    inputs = jnp.array(obs, jnp.float32)[:, None]
    values = jax.vmap(lambda params: networks.value(network, params, inputs))(state.params)
    logits = jax.vmap(lambda params: networks.policy(network, params, inputs))(state.params)
    return np.asarray(values), np.asarray(jax.nn.softmax(logits)[..., 1])


def test_a_constant_reward():
    values, _ = learned("ConstantReward-test", [0.0])
    np.testing.assert_allclose(values, np.ones((NUM_SEEDS, 1)), atol=0.05)


def test_a_reward_that_depends_on_the_observation():
    values, _ = learned("ObservationReward-test", [1.0, -1.0])
    np.testing.assert_allclose(values, np.tile([1.0, -1.0], (NUM_SEEDS, 1)), atol=0.1)


def test_a_delayed_reward_is_discounted():
    values, _ = learned("DelayedReward-test", [0.0, 1.0])
    np.testing.assert_allclose(values, np.tile([GAMMA, 1.0], (NUM_SEEDS, 1)), atol=0.03)


def test_a_reward_that_depends_on_the_action():
    values, right = learned("ActionReward-test", [0.0])
    assert (right > 0.95).all()
    np.testing.assert_allclose(values, np.ones((NUM_SEEDS, 1)), atol=0.1)


def test_a_reward_that_depends_on_observation_and_action():
    values, right = learned("ObservationActionReward-test", [1.0, -1.0], num_updates=100)
    assert (right[:, 0] > 0.9).all()
    assert (right[:, 1] < 0.1).all()
    np.testing.assert_allclose(values, np.ones((NUM_SEEDS, 2)), atol=0.2)


ENDLESS_HPARAMS = HPARAMS._replace(learning_rate=3e-2, gae_lambda=1.0)


def test_a_time_limit_is_not_an_end():
    """Reward 1 for ever is worth 1 / (1 - 0.9) = 10."""
    values, _ = learned("Endless-test", [0.0], ENDLESS_HPARAMS, num_updates=120)
    np.testing.assert_allclose(values, np.full((NUM_SEEDS, 1), 10.0), atol=0.5)


def test_a_time_limit_treated_as_an_end_lowers_the_value():
    """The five sums of 1 to 5 discounted rewards, 1, 1.9, 2.71, 3.439, 4.0951, average to 2.629.

    A rollout of five steps holds one whole episode of each environment.
    """
    values, _ = learned(
        "Endless-test", [0.0], ENDLESS_HPARAMS, num_updates=120, bootstrap_truncated=False, num_steps=5, num_envs=8
    )
    np.testing.assert_allclose(values, np.full((NUM_SEEDS, 1), 2.629), atol=0.15)


@pytest.mark.parametrize("squash", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_action_that_is_a_number(squash):
    """The reward is minus the squared distance to (0.5, 1): however the bounds are kept, the mean goes there."""
    sizes = {"num_envs": 8, "num_steps": 8, "num_epochs": 4, "num_minibatches": 2, "hidden_sizes": (16,)}
    config = ppo.Config(env="Echo-test", total_timesteps=60 * 64, squash=squash, **sizes)
    keys = jax.random.split(jax.random.key(0), NUM_SEEDS)
    hparams = HPARAMS._replace(learning_rate=2e-2, gamma=0.0, log_std_init=-0.5)
    state, metrics = jax.jit(jax.vmap(functools.partial(ppo.train, config), (None, 0)))(hparams, keys)
    assert metrics.all_finite.all()
    network = networks.make(config, envs.make("Echo-test"))
    best = jnp.array([0.5, 1.0])
    _, actions, _ = jax.vmap(lambda params: networks.act(network, params, (), best, jnp.zeros(2)))(state.params)
    np.testing.assert_allclose(network.actions.to_env(actions), np.tile(best, (NUM_SEEDS, 1)), atol=0.2)


def test_two_actions_at_once_on_observations_in_parts():
    sizes = {"num_envs": 8, "num_steps": 8, "num_epochs": 4, "num_minibatches": 2, "hidden_sizes": (16,)}
    config = ppo.Config(env="Nested-test", total_timesteps=60 * 64, **sizes)
    keys = jax.random.split(jax.random.key(0), NUM_SEEDS)
    _, metrics = jax.jit(jax.vmap(functools.partial(ppo.train, config), (None, 0)))(HPARAMS, keys)
    assert (metrics.episode_return[:, -10:].mean(-1) > 1.8).all()
