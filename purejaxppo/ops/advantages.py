"""Advantages: how much better an action was than the value of its state; and discounted sums of rewards."""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from purejaxppo.ops.stats import centre


def gae(
    reward: jax.Array,
    value: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    gamma: jax.typing.ArrayLike,
    gae_lambda: jax.typing.ArrayLike,
    unroll: int = 16,
) -> jax.Array:
    """Generalised advantage estimates.

    delta_t = r_t + gamma * (1 - terminated_t) * v(next_t) - v_t
    A_t = delta_t + gamma * gae_lambda * (1 - done_t) * A_{t+1},  done = terminated or truncated

    A terminal stops the bootstrap; both kinds of end cut the trace. After the last step A is 0: its tail is in
    `next_value` alone.

    Args:
      reward: [T, ...] float32, of step t.
      value: [T, ...] float32, of the state that step t was taken in.
      next_value: [T, ...] float32, of the true successor: the state that step t led to, before any reset.
      terminated: [T, ...] bool, the environment ended the episode at step t.
      truncated: [T, ...] bool, a time limit ended the episode at step t.
      gamma: () discount factor.
      gae_lambda: () decay of the trace.
      unroll: steps in a turn of the loop: an accelerator takes longer to launch so small a step than to compute it.

    Returns:
      [T, ...] float32 advantages, in units of return.

    Raises:
      AssertionError: while tracing, when the shapes differ.

    Source: Schulman et al. 2016, "High-dimensional continuous control using generalized advantage estimation", eq. 16.
    """
    chex.assert_equal_shape([reward, value, next_value, terminated, truncated])
    delta = reward + gamma * jnp.where(terminated, 0.0, next_value) - value
    decay = gamma * gae_lambda * ~(terminated | truncated)

    def step(advantage: jax.Array, inputs: Any) -> tuple[jax.Array, jax.Array]:
        delta_t, decay_t = inputs
        advantage = delta_t + decay_t * advantage
        return advantage, advantage

    _, advantages = jax.lax.scan(step, jnp.zeros_like(delta[0]), (delta, decay), reverse=True, unroll=unroll)
    return advantages


def discounted_sums(
    reward: jax.Array, done: jax.Array, start: jax.Array, gamma: jax.typing.ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """The discounted sum of the rewards of an episode up to each of its steps, g_t = r_t + gamma * g_{t-1}.

    The last reward of an episode belongs to its own sum; the next step starts again from 0.

    Args:
      reward: [T, ...] float32, of step t.
      done: [T, ...] bool, the episode ended at step t.
      start: [...] float32, the sum that the first step continues; 0 for a new episode.
      gamma: () discount factor.

    Returns:
      [T, ...] float32, in units of reward, and the `start` of the next rollout.
    """
    chex.assert_equal_shape([reward, done])

    def step(total: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        reward_t, done_t = inputs
        total = reward_t + gamma * total
        return jnp.where(done_t, 0.0, total), total

    after, sums = jax.lax.scan(step, start, (reward, done))
    return sums, after


def standardize(x: jax.Array, eps: float = 1e-8) -> jax.Array:
    """Mean 0 and population standard deviation 1: (x - mean) / (std + eps). Equal values give exact zeros.

    Args:
      x: [...] float32; all its elements share one mean.
      eps: added to the standard deviation.

    Returns:
      [...] float32, without unit.
    """
    centred = centre(x)
    return centred / (jnp.sqrt(jnp.mean(centred**2)) + eps)
