"""The actor-critic: observation -> parameters of the action distribution, and value."""

from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn

from purejaxppo import ops
from purejaxppo.agent import distributions, layers
from purejaxppo.agent.envs import Env, Spaces
from purejaxppo.agent.layers import Dense, ImageTrunk, RecurrentTrunk, Trunk
from purejaxppo.config import Config
from purejaxppo.types import Batch, Memory

FORBIDDEN = -1e9  # the logit of an action that the mask forbids: of probability 0, and finite


class ActorCritic(nn.Module):
    """Actor and critic, apart unless `shared_trunk`. The last actor layer starts small: a near-uniform policy.

    Attributes:
      hidden_sizes: widths of the hidden layers.
      activation: name of a `products.function`.
      shared_trunk: whether both use the same hidden layers.
      actions: the kind of action distribution.
      image_shape: (height, width, channels) of an observation; () for a vector.
      num_masked: entries at the end of an observation that say which actions are allowed.
      recurrent: whether the last hidden layers carry a memory.
      dtype: of the inputs of matrix products, and of the activations kept; outputs are float32.
      form: how its layers are computed: "plain" for any derivative, "reverse" for learning on a CPU, "few_passes" for
        learning where memory is what it waits for; see `products`.
    """

    hidden_sizes: tuple[int, ...]
    activation: str
    shared_trunk: bool
    actions: distributions.Kind
    image_shape: tuple[int, ...] = ()
    num_masked: int = 0
    recurrent: bool = False
    dtype: Any = jnp.float32
    form: str = "plain"

    def setup(self) -> None:
        def trunk() -> nn.Module:
            settings = (self.hidden_sizes, self.activation, self.dtype, self.form)
            if self.recurrent:
                return RecurrentTrunk(*settings)
            return ImageTrunk(self.image_shape, *settings) if self.image_shape else Trunk(*settings)

        self.actor_trunk = trunk()
        self.critic_trunk = self.actor_trunk if self.shared_trunk else trunk()
        has_std = isinstance(self.actions, distributions.Normal)
        num_outputs = self.actions.num_params // (1 + has_std)
        self.actor_head = Dense(num_outputs, scale=0.01, dtype=self.dtype, form=self.form)
        self.actor_log_std = self.param("actor_log_std", nn.initializers.zeros, (num_outputs,)) if has_std else None
        self.critic_head = Dense(1, scale=1.0, dtype=self.dtype, form=self.form)

    @nn.nowrap
    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        """Parameters at random, from one key: every matrix is an orthonormal one times its layer's scale.

        With their scales the layers fill their matrices themselves; what is random is drawn here, all at once.
        """
        leaves, structure = jax.tree.flatten(super().init(rngs, *args, **kwargs))
        matrices = iter(layers.orthonormal(rngs, [leaf.shape for leaf in leaves if leaf.ndim == 2]))
        return jax.tree.unflatten(structure, [leaf * next(matrices) if leaf.ndim == 2 else leaf for leaf in leaves])

    def policy(self, obs: jax.Array, memory: Any = ()) -> tuple[jax.Array, Any]:
        """obs [..., O], memory [..., H] -> parameters of the action distribution [..., P], memory after the step."""
        hidden, memory = self.hidden(self.actor_trunk, obs, memory)
        outputs = self.actor_head(hidden)
        if self.num_masked:
            outputs = jnp.where(obs[..., -self.num_masked :] > 0, outputs, FORBIDDEN)
        if self.actor_log_std is not None:
            log_std = jnp.clip(self.actor_log_std, distributions.MIN_LOG_STD, distributions.MAX_LOG_STD)
            outputs = jnp.concatenate([outputs, jnp.broadcast_to(log_std, outputs.shape)], axis=-1)
        return outputs, memory

    def value(self, obs: jax.Array, memory: Any = ()) -> tuple[jax.Array, Any]:
        """obs [..., O], memory [..., H] -> value [...], memory after the step."""
        hidden, memory = self.hidden(self.critic_trunk, obs, memory)
        return self.critic_head(hidden).squeeze(-1), memory

    def hidden(self, trunk: nn.Module, obs: jax.Array, memory: Any) -> tuple[jax.Array, Any]:
        """What the heads take, and the memory after the step."""
        features = self.features(obs)
        return trunk(features, memory) if self.recurrent else (trunk(features), memory)

    def features(self, obs: jax.Array) -> jax.Array:
        """An observation without its action mask."""
        return obs[..., : obs.shape[-1] - self.num_masked] if self.num_masked else obs

    def __call__(self, obs: jax.Array, memory: Any = ()) -> Any:
        """Both, to initialise both."""
        return self.policy(obs, memory), self.value(obs, memory)


def make(config: Config, env: Env | Spaces) -> ActorCritic:
    """The network of this config for this environment.

    Raises:
      ValueError: for `squash` or `rescale_actions` without bounds, or a convolution of what is no image.
    """
    actions = distributions.make(config, env.name, env.actions)
    image_shape = _image_shape(env) if config.network == "cnn" else ()
    return ActorCritic(
        hidden_sizes=config.hidden_sizes,
        activation=config.activation,
        shared_trunk=config.shared_trunk,
        actions=actions,
        image_shape=image_shape,
        num_masked=env.num_masked,
        recurrent=config.network == "gru",
        dtype=jnp.dtype(config.compute_dtype),
    )


def _image_shape(env: Env | Spaces) -> tuple[int, ...]:
    """(height, width, channels); an observation of two axes has one channel."""
    shape = (*env.obs_shape, 1) if len(env.obs_shape) == 2 else env.obs_shape
    if len(shape) != 3 or min(shape[:2]) < 3:
        raise ValueError(
            f"config.network = 'cnn': observations of {env.name} have shape {env.obs_shape}; "
            "allowed with images (height, width[, channels]) of at least 3 x 3"
        )
    return shape


def init(network: ActorCritic, key: jax.Array, obs: jax.Array, log_std_init: jax.typing.ArrayLike) -> Any:
    """The parameters at the start of a run, from observations [N, O] of any value."""
    params = network.init(key, obs, first_memory(network, obs.shape[0]).actor)
    leaves = params["params"]
    if "actor_log_std" in leaves:
        leaves = leaves | {"actor_log_std": jnp.full_like(leaves["actor_log_std"], log_std_init)}
    return {"params": leaves}


def split(params: Any) -> tuple[Any, Any]:
    """The parameters of the actor, a shared trunk included, and those of the critic alone."""
    modules = params["params"]
    actor = {name: leaves for name, leaves in modules.items() if name.startswith("actor_")}
    return actor, {name: leaves for name, leaves in modules.items() if name not in actor}


def joined(actor: Any, critic: Any) -> Any:
    """What `split` took apart."""
    return {"params": actor | critic}


def policy(network: ActorCritic, params: Any, obs: jax.Array) -> jax.Array:
    """Without memory: obs [..., O] -> parameters of the action distribution [..., P]."""
    return cast(jax.Array, network.apply(params, obs, method="policy")[0])


def value(network: ActorCritic, params: Any, obs: jax.Array) -> jax.Array:
    """Without memory: obs [..., O] -> value [...], in units of return."""
    return cast(jax.Array, network.apply(params, obs, method="value")[0])


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
    network: ActorCritic, params: Any, obs_stats: Any, obs: jax.Array, noise: jax.Array, memory: Any = ()
) -> tuple[jax.Array, jax.Array, Any]:
    """An action on raw observations, the one way to act in training, in evaluation and after.

    Args:
      obs: [..., O] float32, raw.
      noise: [..., noise] float32 from `network.actions.draw_noise`; 0 gives the most likely action.
      memory: [..., H] float32 of the actor of a recurrent network, 0 at the start of an episode.

    Returns:
      Parameters of the action distribution [..., P]; the action as it is drawn, of which the environment is to be
      given `network.actions.to_env(action)`; and the memory after the step.
    """
    dist_params, memory = network.apply(params, normalize(obs_stats, obs), memory, method="policy")
    return dist_params, network.actions.sample(dist_params, noise), memory


def rounded(network: ActorCritic, params: Any) -> Any:
    """The parameters with their matrices as they are multiplied: rounded once, and not in every step of a loop."""
    return jax.tree.map(lambda leaf: leaf.astype(network.dtype) if leaf.ndim > 1 else leaf, params)


def first_memory(network: ActorCritic, num: int) -> Memory:
    """At the start of `num` episodes: zeros [num, H] each, or nothing."""
    if not network.recurrent:
        return Memory()
    return Memory(*jnp.zeros((2, num, network.hidden_sizes[-1]), jnp.float32))


def forget(memory: Any, ended: jax.Array) -> Any:
    """Zero where an episode has ended: memory [..., H] or (), ended [...]."""
    return jax.tree.map(lambda x: jnp.where(ended[..., None], 0.0, x), memory)


def values(
    network: ActorCritic,
    params: Any,
    obs: jax.Array,
    last_obs: jax.Array,
    final_obs: jax.Array,
    ended: jax.Array,
    truncated: jax.Array,
    num_stretches: int,
    memory: Any,
) -> tuple[jax.Array, jax.Array, Any]:
    """The critic on a rollout: values of the states and, unless they are terminal, of their true successors.

    The successor of a state is the next one of the rollout, except where the episode was truncated: only there is the
    critic evaluated on the final observation.

    Args:
      obs, final_obs: [T, N, O] float32, as the networks see them; of each state and of its true successor.
      last_obs: [N, O] float32, the one that follows the rollout.
      ended: [T, N] bool, the episode ended at this step.
      truncated: [T, N] bool, because of its time limit.
      num_stretches: K, a divisor of T; in none of K equal stretches is an environment truncated more than once.
      memory: [N, H] of the critic before the first step, or ().

    Returns:
      Both [T, N] float32, and the memory after the last step.
    """
    if not network.recurrent:
        stretches = (num_stretches, len(obs) // num_stretches)
        step_of_limit = jnp.argmax(truncated.reshape(*stretches, -1), axis=1, keepdims=True)
        at_limit = jnp.take_along_axis(final_obs.reshape(*stretches, *last_obs.shape), step_of_limit[..., None], axis=1)
        all_values = value(network, params, jnp.concatenate([obs, last_obs[None], at_limit[:, 0]]))
        final = jnp.repeat(all_values[len(obs) + 1 :], stretches[1], axis=0)
        following = all_values[1 : len(obs) + 1]
        return all_values[: len(obs)], jnp.where(truncated, final, following), memory

    def step(memory: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        obs, final_obs, ended = inputs
        value_, after = network.apply(params, obs, memory, method="value")
        next_value, _ = network.apply(params, final_obs, after, method="value")
        return forget(after, ended), (cast(jax.Array, value_), cast(jax.Array, next_value))

    memory, (value_, next_value) = jax.lax.scan(step, memory, (obs, final_obs, ended))
    return value_, next_value, memory


def batch_policy(network: ActorCritic, params: Any, batch: Batch) -> jax.Array:
    """Parameters of the action distributions at the observations of a batch, [..., P]."""
    if not network.recurrent:
        return policy(network, params, batch.obs)
    return _unroll(network, params, "policy", batch, batch.memory.actor)


def batch_value(network: ActorCritic, params: Any, batch: Batch) -> jax.Array:
    """Values at the observations of a batch, [...], in units of return."""
    if not network.recurrent:
        return value(network, params, batch.obs)
    return _unroll(network, params, "value", batch, batch.memory.critic)


def _unroll(network: ActorCritic, params: Any, method: str, batch: Batch, memory: jax.Array) -> jax.Array:
    """The outputs [N, T, ...] along the stretches of a batch, forgetting where the rollout did."""

    def step(memory: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        obs, fresh = inputs
        output, after = network.apply(params, obs, forget(memory, fresh), method=method)
        return cast(jax.Array, after), cast(jax.Array, output)

    _, outputs = jax.lax.scan(step, memory, (batch.obs.swapaxes(0, 1), batch.fresh.swapaxes(0, 1)))
    return outputs.swapaxes(0, 1)
