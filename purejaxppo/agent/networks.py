"""The actor-critic, and the distribution that its outputs stand for."""

from collections.abc import Sequence
from typing import Any, cast

import distrax
import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.nn.initializers import Initializer

from purejaxppo import ops
from purejaxppo.agent.envs import Env, Spaces
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
      num_actions: A.
    """

    hidden_sizes: tuple[int, ...]
    activation: str
    shared_trunk: bool
    num_actions: int

    def setup(self) -> None:
        self.actor_trunk = Trunk(self.hidden_sizes, self.activation)
        self.critic_trunk = self.actor_trunk if self.shared_trunk else Trunk(self.hidden_sizes, self.activation)
        self.actor_head = nn.Dense(self.num_actions, kernel_init=orthogonal(0.01))
        self.critic_head = nn.Dense(1, kernel_init=orthogonal(1.0))

    def policy(self, obs: jax.Array) -> jax.Array:
        """obs [..., O] -> parameters of the action distribution [..., P]: logits, P = A."""
        return self.actor_head(self.actor_trunk(obs))

    def value(self, obs: jax.Array) -> jax.Array:
        """obs [..., O] -> value [...]."""
        return self.critic_head(self.critic_trunk(obs)).squeeze(-1)

    def __call__(self, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Both, to initialise both."""
        return self.policy(obs), self.value(obs)


def make(config: Config, env: Env | Spaces) -> ActorCritic:
    """The network of this config for this environment."""
    return ActorCritic(config.hidden_sizes, config.activation, config.shared_trunk, env.num_actions)


def policy(network: ActorCritic, params: Any, obs: jax.Array) -> jax.Array:
    """obs [..., O] -> parameters of the action distribution [..., P]."""
    return cast(jax.Array, network.apply(params, obs, method="policy"))


def value(network: ActorCritic, params: Any, obs: jax.Array) -> jax.Array:
    """obs [..., O] -> value [...], in units of return."""
    return cast(jax.Array, network.apply(params, obs, method="value"))


def distribution(dist_params: jax.Array) -> distrax.Categorical:
    """dist_params [..., P] -> the action distribution, batch shape [...]."""
    return distrax.Categorical(logits=dist_params)


def kl(old_dist_params: jax.Array, new_dist_params: jax.Array) -> jax.Array:
    """The exact KL(old || new) of the distributions of two [..., P], [...] float32, nats."""
    return ops.kl_categorical(old_dist_params, new_dist_params)


def draw_noise(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """All the noise of a rollout in one draw, [..., P] for `sample`: standard Gumbel."""
    return jax.random.gumbel(key, shape)


def sample(dist_params: jax.Array, noise: jax.Array) -> jax.Array:
    """An action [...] int32 from the distribution of `dist_params` [..., P], by its `noise` [..., P].

    argmax(logits + Gumbel noise) is an exact categorical sample. Zero noise gives the mode. NaN logits give a valid
    action, so a diverged run goes on and `Metrics.all_finite` reports it.
    """
    return jnp.argmax(dist_params + noise, axis=-1).astype(jnp.int32)
