"""Normal policies through the whole family: the loss, the KL penalty, the early stop and TRPO, against NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purejaxppo as ppo
from purejaxppo.agent import envs, networks, rollout
from purejaxppo.agent import ppo as agent_ppo
from purejaxppo.train import estimate
from tests.helpers import floats, tiny

CONFIG = tiny(env="Echo-test", num_envs=4, num_steps=16, total_timesteps=64, kl_penalty=True)
HPARAMS = floats(ppo.HParams(clip_eps=0.1, ent_coef=0.3, vf_coef=0.7, kl_coef=0.9))


@functools.cache
def collected(squash):
    """(config, network, params, batch) of a rollout, with a deviation of its own in each dimension."""
    config = dataclasses.replace(CONFIG, squash=squash)
    env = envs.make(config.env)
    network = networks.make(config, env)

    def collect(key):
        state = ppo.init(config, HPARAMS, key)
        log_std = jnp.array([0.3, -0.5])
        state = state._replace(params={"params": state.params["params"] | {"actor_log_std": log_std}})
        transition = rollout.collect(config, env, network, state, jax.random.key(1))[1]
        return state.params, estimate(config, HPARAMS, transition)

    return config, network, *jax.jit(collect)(jax.random.key(0))


def moved(params):
    """Other parameters: a wider first dimension, and other means."""
    modules = params["params"]
    head = modules["actor_head"]
    return {
        "params": modules
        | {
            "actor_log_std": modules["actor_log_std"] + jnp.array([0.2, -0.1]),
            "actor_head": {"kernel": head["kernel"] * 5, "bias": head["bias"] + jnp.array([0.1, -0.2])},
        }
    }


def split(dist_params):
    return np.split(np.asarray(dist_params, np.float64), 2, axis=-1)


def numpy_kl(old, new):
    (old_mean, old_log_std), (new_mean, new_log_std) = split(old), split(new)
    ratio = np.exp(2 * (old_log_std - new_log_std))
    distance = (old_mean - new_mean) ** 2 * np.exp(-2 * new_log_std)
    return (new_log_std - old_log_std + (ratio + distance - 1) / 2).sum(-1)


def numpy_log_prob(dist_params, action):
    """Up to what does not depend on the policy, as the slope of the tanh."""
    mean, log_std = split(dist_params)
    return -(((action - mean) * np.exp(-log_std)) ** 2 / 2 + log_std).sum(-1)


@pytest.mark.parametrize("squash", [False, True])
def test_the_loss_equals_the_one_written_out(squash):
    config, network, params, batch = collected(squash)
    new = moved(params)
    dist_params = networks.policy(network, new, batch.obs)
    action = np.asarray(batch.action, np.float64)
    ratio = np.exp(numpy_log_prob(dist_params, action) - numpy_log_prob(batch.dist_params, action))
    advantages = np.asarray(batch.advantages, np.float64)
    advantages = (advantages - advantages.mean()) / advantages.std()
    surrogate = np.minimum(ratio * advantages, np.clip(ratio, 0.9, 1.1) * advantages)
    policy_loss = -surrogate.mean() + 0.9 * numpy_kl(batch.dist_params, dist_params).mean()
    whole = dataclasses.replace(config, num_minibatches=1)
    minibatches = agent_ppo.minibatches(whole, batch, np.arange(config.batch_size))
    minibatch = jax.tree.map(lambda x: x[0], minibatches)
    _, (actual, _) = agent_ppo.loss(new, config, HPARAMS, network, minibatch, HPARAMS.kl_coef)
    np.testing.assert_allclose(actual, policy_loss, rtol=1e-3)
    diagnostics = agent_ppo.diagnose(HPARAMS, network, new, batch)
    np.testing.assert_allclose(diagnostics.exact_kl, numpy_kl(batch.dist_params, dist_params).mean(), rtol=1e-4)
    np.testing.assert_allclose(diagnostics.approx_kl, (ratio - 1 - np.log(ratio)).mean(), rtol=1e-3)
    np.testing.assert_allclose(diagnostics.clip_fraction, (np.abs(ratio - 1) > 0.1).mean())
    if not squash:
        entropy = (0.5 * np.log(2 * np.pi * np.e) + split(dist_params)[1]).sum(-1).mean()
        np.testing.assert_allclose(diagnostics.entropy, entropy, rtol=1e-5)


@pytest.mark.parametrize("squash", [False, True])
def test_the_estimates_agree_with_the_exact_kl(squash):
    """Over many actions of the old policy, k3 and the mean log-ratio are the exact KL."""
    _, network, params, batch = collected(squash)
    old = jnp.broadcast_to(batch.dist_params[:1], (100_000, 4))
    new = jnp.broadcast_to(networks.policy(network, moved(params), batch.obs[:1]), (100_000, 4))
    action = network.actions.sample(old, network.actions.draw_noise(jax.random.key(5), (100_000,)))
    log_prob = jax.jit(lambda dist_params: network.actions.distribution(dist_params).log_prob(action))
    np.testing.assert_allclose(np.mean(log_prob(old) - log_prob(new)), network.actions.kl(old, new)[0], rtol=0.05)


@pytest.mark.parametrize("squash", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_trust_region_step_of_a_normal_policy_keeps_to_its_bound(squash):
    config = dataclasses.replace(CONFIG, algorithm="trpo", kl_penalty=False, squash=squash, total_timesteps=3 * 64)
    hparams = floats(ppo.HParams(max_kl=0.01, log_std_init=-0.5))
    state, metrics = jax.jit(functools.partial(ppo.train, config))(hparams, jax.random.key(0))
    assert metrics.all_finite.all()
    assert (metrics.step_scale > 0).all()
    assert (metrics.exact_kl <= 0.01).all()
    assert (metrics.exact_kl > 0.002).all()
    assert np.abs(state.params["params"]["actor_log_std"] + 0.5).max() > 0.01


@pytest.mark.slow
def test_the_epochs_of_a_normal_policy_stop_at_the_target():
    config = dataclasses.replace(CONFIG, kl_penalty=False, kl_early_stopping=True, num_epochs=4)
    run = jax.jit(functools.partial(ppo.train, config))
    stopped = run(floats(ppo.HParams(target_kl=1e-6, learning_rate=0.02)), jax.random.key(0))[1]
    free = run(floats(ppo.HParams(target_kl=1e6, learning_rate=0.02)), jax.random.key(0))[1]
    np.testing.assert_array_equal(stopped.num_epochs, [1])
    np.testing.assert_array_equal(free.num_epochs, [4])
