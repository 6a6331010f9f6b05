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

FORBIDDEN = -1e9  # the logit of an action that the mask forbids: of probability 0, and finite


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


class ImageTrunk(nn.Module):
    """A convolution of 3 x 3, then the hidden layers: obs [..., O] -> features [..., hidden_sizes[-1]].

    The convolution is one matrix product on the nine neighbours of every pixel. As a convolution, `vmap` over runs
    would make a grouped one of it, which is far slower.

    Source: Young and Tian 2019, "MinAtar", for its size of 16 filters.
    """

    shape: tuple[int, ...]  # (height, width, channels)
    hidden_sizes: tuple[int, ...]
    activation: str

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        height, width = self.shape[0] - 2, self.shape[1] - 2
        image = obs.reshape(*obs.shape[:-1], *self.shape)
        shifted = [image[..., i : i + height, j : j + width, :] for i in range(3) for j in range(3)]
        features = nn.Dense(16, kernel_init=orthogonal(2**0.5))(jnp.concatenate(shifted, axis=-1))
        features = getattr(jax.nn, self.activation)(features).reshape(*obs.shape[:-1], -1)
        return Trunk(self.hidden_sizes, self.activation)(features)


class ActorCritic(nn.Module):
    """Actor and critic, apart unless `shared_trunk`. The last actor layer starts small: a near-uniform policy.

    Attributes:
      hidden_sizes: widths of the hidden layers.
      activation: name of a function in `jax.nn`.
      shared_trunk: whether both use the same hidden layers.
      actions: the kind of action distribution.
      image_shape: (height, width, channels) of an observation; () for a vector.
      num_masked: entries at the end of an observation that say which actions are allowed.
    """

    hidden_sizes: tuple[int, ...]
    activation: str
    shared_trunk: bool
    actions: distributions.Kind
    image_shape: tuple[int, ...] = ()
    num_masked: int = 0

    def setup(self) -> None:
        def trunk() -> nn.Module:
            if self.image_shape:
                return ImageTrunk(self.image_shape, self.hidden_sizes, self.activation)
            return Trunk(self.hidden_sizes, self.activation)

        self.actor_trunk = trunk()
        self.critic_trunk = self.actor_trunk if self.shared_trunk else trunk()
        has_std = isinstance(self.actions, distributions.Normal)
        num_outputs = self.actions.num_params // (1 + has_std)
        self.actor_head = nn.Dense(num_outputs, kernel_init=orthogonal(0.01))
        self.actor_log_std = self.param("actor_log_std", nn.initializers.zeros, (num_outputs,)) if has_std else None
        self.critic_head = nn.Dense(1, kernel_init=orthogonal(1.0))

    def policy(self, obs: jax.Array) -> jax.Array:
        """obs [..., O] -> parameters of the action distribution [..., P]."""
        outputs = self.actor_head(self.actor_trunk(self.features(obs)))
        if self.num_masked:
            return jnp.where(obs[..., -self.num_masked :] > 0, outputs, FORBIDDEN)
        if self.actor_log_std is None:
            return outputs
        log_std = jnp.clip(self.actor_log_std, distributions.MIN_LOG_STD, distributions.MAX_LOG_STD)
        return jnp.concatenate([outputs, jnp.broadcast_to(log_std, outputs.shape)], axis=-1)

    def value(self, obs: jax.Array) -> jax.Array:
        """obs [..., O] -> value [...]."""
        return self.critic_head(self.critic_trunk(self.features(obs))).squeeze(-1)

    def features(self, obs: jax.Array) -> jax.Array:
        """An observation without its action mask."""
        return obs[..., : obs.shape[-1] - self.num_masked] if self.num_masked else obs

    def __call__(self, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Both, to initialise both."""
        return self.policy(obs), self.value(obs)


def make(config: Config, env: Env) -> ActorCritic:
    """The network of this config for this environment.

    Raises:
      ValueError: for `squash` or `rescale_actions` without bounds, or a convolution of what is no image.
    """
    actions = distributions.make(config, env.name, env.actions)
    image_shape = _image_shape(env) if config.network == "cnn" else ()
    return ActorCritic(
        config.hidden_sizes, config.activation, config.shared_trunk, actions, image_shape, env.num_masked
    )


def _image_shape(env: Env) -> tuple[int, ...]:
    """(height, width, channels); an observation of two axes has one channel."""
    shape = (*env.obs_shape, 1) if len(env.obs_shape) == 2 else env.obs_shape
    if len(shape) != 3 or min(shape[:2]) < 3:
        raise ValueError(
            f"config.network = 'cnn': observations of {env.name} have shape {env.obs_shape}; "
            "allowed with images (height, width[, channels]) of at least 3 x 3"
        )
    return shape


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
    """A raw observation [..., O] as the networks see it: standard scores, or itself where obs_stats is ().

    An action mask at its end, of which there are no statistics, stays as it is.
    """
    if obs_stats == ():
        return obs
    num_features = obs_stats.mean.shape[-1]
    scores = ops.standard_score(obs_stats, obs[..., :num_features])
    return scores if num_features == obs.shape[-1] else jnp.concatenate([scores, obs[..., num_features:]], axis=-1)


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
