"""Acting with a trained policy: observations in, actions out, without an environment or an optimiser."""

from typing import Any

import jax
import jax.numpy as jnp

from purejaxppo.agent import envs, networks
from purejaxppo.agent.envs import Spaces
from purejaxppo.config import Config


def act(config: Config, spaces: Spaces, params: Any, obs: jax.Array) -> jax.Array:
    """The most likely actions.

    Args:
      config: of the run that trained the policy.
      spaces: of its environment.
      params: of its network.
      obs: one observation or any batch of them, as the environment shows them or flattened.

    Returns:
      Actions [...] int32, one an observation.

    Raises:
      ValueError: for observations of another shape.
    """
    return networks.sample(_dist_params(config, spaces, params, obs), jnp.zeros(()))


def sample(config: Config, spaces: Spaces, params: Any, obs: jax.Array, key: jax.Array) -> jax.Array:
    """Actions drawn from the policy, each by itself; as `act`.

    Args:
      key: () typed key.
    """
    dist_params = _dist_params(config, spaces, params, obs)
    return networks.sample(dist_params, networks.draw_noise(key, dist_params.shape))


def _dist_params(config: Config, spaces: Spaces, params: Any, obs: jax.Array) -> jax.Array:
    return networks.policy(networks.make(config, spaces), params, envs.flatten(spaces, obs))
