"""The actor-critic: observation -> parameters of the action distribution, and value."""

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.nn.initializers import Initializer

from purejaxppo import ops
from purejaxppo.agent import distributions
from purejaxppo.agent.envs import Env
from purejaxppo.config import Config


def orthogonal(scale: float) -> Initializer:
    """Orthogonal rows or columns, whichever are fewer, times `scale`; uniform over all such matrices.

    By Gram-Schmidt on a Gaussian matrix instead of the usual QR: a batched LAPACK call, which `vmap` makes of QR,
    waits for itself for ever on two-core machines under jaxlib 0.10, and runs one matrix at a time on a GPU.

    Source: Saxe et al. 2014, "Exact solutions to the nonlinear dynamics of learning in deep linear neural networks".
    """

    def init(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32, out_sharding: Any = None) -> jax.Array:
        del out_sharding
        columns = jax.random.normal(key, (min(shape), max(shape)), dtype)

        def step(basis: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
            column = columns[index]
            for _ in range(2):  # once loses orthogonality to rounding; twice is enough (Giraud et al. 2005)
                column = column - basis.T @ (basis @ column)
            return basis.at[index].set(column / jnp.linalg.norm(column)), None

        basis, _ = jax.lax.scan(step, jnp.zeros_like(columns), jnp.arange(min(shape)))
        return scale * (basis if shape[0] <= shape[1] else basis.T)

    return init


class Trunk(nn.Module):
    """The hidden layers: obs [..., O] -> features [..., hidden_sizes[-1]]."""

    hidden_sizes: tuple[int, ...]
    activation: str

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        features = obs
        for size in self.hidden_sizes:
            features = nn.Dense(size, kernel_init=orthogonal(2**0.5))(features)
            features = getattr(jax.nn, self.activation)(features)
        return features


class ActorCritic(nn.Module):
    """Actor and critic, apart unless `shared_trunk`. The last actor layer starts small: a near-uniform policy.

    Attributes:
      hidden_sizes: widths of the hidden layers.
      activation: name of a function in `jax.nn`.
      shared_trunk: whether both use the same hidden layers.
      actions: the kind of action distribution.
    """

    hidden_sizes: tuple[int, ...]
    activation: str
    shared_trunk: bool
    actions: distributions.Kind

    def setup(self) -> None:
        self.actor_trunk = Trunk(self.hidden_sizes, self.activation)
        self.critic_trunk = self.actor_trunk if self.shared_trunk else Trunk(self.hidden_sizes, self.activation)
        has_std = isinstance(self.actions, distributions.Normal)
        num_outputs = self.actions.num_params // (1 + has_std)
        self.actor_head = nn.Dense(num_outputs, kernel_init=orthogonal(0.01))
        self.actor_log_std = self.param("actor_log_std", nn.initializers.zeros, (num_outputs,)) if has_std else None
        self.critic_head = nn.Dense(1, kernel_init=orthogonal(1.0))

    def policy(self, obs: jax.Array) -> jax.Array:
        """obs [..., O] -> parameters of the action distribution [..., P]."""
        outputs = self.actor_head(self.actor_trunk(obs))
        if self.actor_log_std is None:
            return outputs
        log_std = jnp.clip(self.actor_log_std, distributions.MIN_LOG_STD, distributions.MAX_LOG_STD)
        return jnp.concatenate([outputs, jnp.broadcast_to(log_std, outputs.shape)], axis=-1)

    def value(self, obs: jax.Array) -> jax.Array:
        """obs [..., O] -> value [...]."""
        return self.critic_head(self.critic_trunk(obs)).squeeze(-1)

    def __call__(self, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Both, to initialise both."""
        return self.policy(obs), self.value(obs)


def make(config: Config, env: Env) -> ActorCritic:
    """The network of this config for this environment."""
    actions = distributions.make(config, env.name, env.actions)
    return ActorCritic(config.hidden_sizes, config.activation, config.shared_trunk, actions)


def init(network: ActorCritic, key: jax.Array, obs: jax.Array, log_std_init: jax.typing.ArrayLike) -> Any:
    """The parameters at the start of a run, from observations [..., O] of any value."""
    params = network.init(key, obs)
    leaves = params["params"]
    if "actor_log_std" in leaves:
        leaves = leaves | {"actor_log_std": jnp.full_like(leaves["actor_log_std"], log_std_init)}
    return {"params": leaves}


def policy(network: ActorCritic, params: Any, obs: jax.Array) -> jax.Array:
    """obs [..., O] -> parameters of the action distribution [..., P]."""
    return cast(jax.Array, network.apply(params, obs, method="policy"))


def value(network: ActorCritic, params: Any, obs: jax.Array) -> jax.Array:
    """obs [..., O] -> value [...], in units of return."""
    return cast(jax.Array, network.apply(params, obs, method="value"))


def normalize(obs_stats: Any, obs: jax.Array) -> jax.Array:
    """A raw observation [..., O] as the networks see it: its standard score, or itself where obs_stats is ()."""
    return obs if obs_stats == () else ops.standard_score(obs_stats, obs)


def act(
    network: ActorCritic, params: Any, obs_stats: Any, obs: jax.Array, noise: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """An action on raw observations, the one way to act in training, in evaluation and after.

    Args:
      obs: [..., O] float32, raw.
      noise: [..., noise] float32 from `network.actions.draw_noise`; 0 gives the most likely action.

    Returns:
      Parameters of the action distribution [..., P], and the action as it is drawn; the environment is to be given
      `network.actions.to_env(action)`.
    """
    dist_params = policy(network, params, normalize(obs_stats, obs))
    return dist_params, network.actions.sample(dist_params, noise)
