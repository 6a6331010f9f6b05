"""Collect: T steps of N environments under the current policy."""

from typing import Any

import jax
import jax.numpy as jnp

from purejaxppo import devices, ops
from purejaxppo.agent import networks
from purejaxppo.agent.envs import Env
from purejaxppo.config import Config
from purejaxppo.types import Memory, TrainState, Transition


def collect(
    config: Config, env: Env, network: networks.ActorCritic, state: TrainState, key: jax.Array
) -> tuple[TrainState, Transition]:
    """Steps the environments `num_steps` times and evaluates the critic on everything they saw.

    What random numbers alone decide is drawn before the scan, the starts of episodes included; inside it stand the
    actor and the environments alone: all side by side, two steps a turn, since a turn copies what it carries; or, if
    they are few and small, one after another, as the one kernel that a CPU makes of such loops. Observations are
    normalised throughout by the statistics that the rollout started with, and added to them at its end.

    Args:
      key: () typed key, used up here.

    Returns:
      The state with its environments moved on, and the rollout [T, N].
    """
    noise_key, step_key = jax.random.split(key)
    shape = (config.num_steps, config.num_envs)
    noise = network.actions.draw_noise(noise_key, shape)
    prepared = jax.vmap(jax.vmap(env.prepare))(jax.random.split(step_key, shape))
    params = networks.rounded(network, state.params)

    def step_one(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        obs, env_state, memory, noise, prepared = inputs
        dist_params, action, memory = networks.act(network, params, state.obs_stats, obs, noise, memory)
        # The barrier keeps the environment from being computed again for each of the arrays that store a part of it.
        env_step = jax.lax.optimization_barrier(env.advance(prepared, env_state, network.actions.to_env(action)))
        return dist_params, action, memory, env_step

    in_turn = devices.has_kernel_loops() and steps_in_turn(config)

    def step(carry: tuple[Any, ...], inputs: tuple[jax.Array, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        env_state, obs, memory, episode_return, episode_length = carry
        each = (obs, env_state, memory, *inputs)
        dist_params, action, memory, env_step = jax.lax.map(step_one, each) if in_turn else jax.vmap(step_one)(each)
        episode_return += env_step.reward
        episode_length += 1
        ended = env_step.terminated | env_step.truncated
        next_carry = (
            env_step.state,
            env_step.obs,
            networks.forget(memory, ended),
            jnp.where(ended, 0.0, episode_return),
            jnp.where(ended, 0, episode_length),
        )
        # What is small is stored side by side: an array of its own costs an accelerator a launch at every step.
        reals = jnp.column_stack([dist_params, env_step.reward, episode_return])
        counts = jnp.column_stack([env_step.terminated, env_step.truncated, episode_length])
        return next_carry, (obs, env_step.final_obs, action, reals, counts)

    carry = (state.env_state, state.obs, state.memory.actor, state.episode_return, state.episode_length)
    carry, stored = jax.lax.scan(step, carry, (noise, prepared), unroll=1 if in_turn else 2)
    obs, final_obs, action, reals, counts = stored
    dist_params, reward, episode_return = reals[..., :-2], reals[..., -2], reals[..., -1]
    terminated, truncated, episode_length = counts[..., 0] > 0, counts[..., 1] > 0, counts[..., 2]
    seen, last_seen, final_seen = (networks.normalize(state.obs_stats, x) for x in (obs, carry[1], final_obs))
    value, next_value, critic_memory = networks.values(
        network,
        state.params,
        seen,
        last_seen,
        final_seen,
        terminated | truncated,
        truncated,
        num_stretches(config.num_steps, env.time_limit),
        state.memory.critic,
    )
    transition = Transition(
        obs=seen,
        action=action,
        dist_params=dist_params,
        log_prob=network.actions.distribution(dist_params).log_prob(action),
        value=value,
        next_value=jnp.where(terminated, 0.0, next_value),
        reward=reward,
        terminated=terminated,
        truncated=truncated,
        episode_return=episode_return,
        episode_length=episode_length,
    )
    if config.normalize_observations:
        samples = network.features(obs).reshape(config.batch_size, -1)
        state = state._replace(obs_stats=ops.merge_moments(state.obs_stats, ops.moments(samples)))
    env_state, obs, actor_memory, running_return, running_length = carry
    state = state._replace(
        env_state=env_state,
        obs=obs,
        memory=Memory(actor_memory, critic_memory),
        episode_return=running_return,
        episode_length=running_length,
    )
    return state, transition


def steps_in_turn(config: Config) -> bool:
    """Whether a CPU takes the environments one after another faster than side by side."""
    return config.num_envs <= 8 and max(config.hidden_sizes, default=0) <= 64 and config.network != "cnn"


def num_stretches(num_steps: int, time_limit: int) -> int:
    """Into how many equal stretches, at least, `num_steps` divide so that none is longer than `time_limit`."""
    return next(num for num in range(1, num_steps + 1) if num_steps % num == 0 and num_steps <= num * time_limit)
