"""Acting with a trained policy: observations in, actions out, without an environment or an optimiser."""

from typing import Any

import jax
import jax.numpy as jnp

from purejaxppo.agent import envs, networks
from purejaxppo.agent.envs import Spaces
from purejaxppo.config import Config


def act(
    config: Config,
    spaces: Spaces,
    params: Any,
    obs_stats: Any,
    obs: jax.Array,
    memory: Any = (),
    key: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """Actions as the environment takes them.

    Args:
      config: of the run that trained the policy.
      spaces: of its environment.
      params: of its network.
      obs_stats: the moments of its normaliser; () without one.
      obs: one observation or any batch of them, raw, as the environment shows them or flattened.
      memory: [..., H] of a recurrent network, after the step before.
      key: () typed key, to draw each action from the policy by itself; without one they are the most likely ones.

    Returns:
      Actions, one an observation: [...] int32, or [..., D] where an action has D parts; and the memory after the step.

    Raises:
      ValueError: for observations of another shape.
    """
    network, flat = networks.make(config, spaces), envs.flatten(spaces, obs)
    noise = jnp.zeros(()) if key is None else network.actions.draw_noise(key, flat.shape[:-1])
    _, action, memory = networks.act(network, params, obs_stats, flat, noise, memory)
    return network.actions.to_env(action), memory


def first_memory(config: Config, spaces: Spaces, batch_shape: tuple[int, ...] = ()) -> Any:
    """Of a recurrent network at the start of an episode, zeros [*batch_shape, H]; () for others."""
    memory = networks.first_memory(networks.make(config, spaces), 1).actor
    return jax.tree.map(lambda leaf: jnp.zeros((*batch_shape, *leaf.shape[1:]), leaf.dtype), memory)
