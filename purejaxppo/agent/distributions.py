"""Action distributions: one kind for each kind of action space, chosen by `make`.

A kind says how many parameters a distribution has, P, what those stand for, and how an action is drawn from noise that
was drawn before: `sample` at noise zero gives the mode. What it samples is stored, and its `log_prob` is of that;
`to_env` makes of it what the environment takes. So a normal action is stored as it was drawn, and clipped or squashed
to the bounds for the environment alone: log-probabilities at sampling and at learning are of the same number.

distrax, which imports TensorFlow Probability, is imported on first use: half a second that categorical policies, which
most are, do not need.
"""

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from purejaxppo import ops
from purejaxppo.agent.envs import Box, Discrete, MultiDiscrete
from purejaxppo.config import Config

if TYPE_CHECKING:
    import distrax

# The policy keeps its log standard deviations in here, where float32 still tells an action from the mean.
MIN_LOG_STD, MAX_LOG_STD = -10.0, 10.0


@dataclasses.dataclass(frozen=True)
class Categorical:
    """One of `num_actions`; dist_params are the logits, P = A; an action is [...] int32."""

    num_actions: int

    @property
    def num_params(self) -> int:
        return self.num_actions

    def distribution(self, dist_params: jax.Array) -> "Choice":
        """dist_params [..., P] -> log_prob(action) [...] and entropy() [...], nats."""
        return Choice(dist_params)

    def kl(self, old_dist_params: jax.Array, new_dist_params: jax.Array) -> jax.Array:
        """The exact KL(old || new) of two [..., P], [...] float32, nats."""
        return ops.kl_categorical(old_dist_params, new_dist_params)

    def draw_noise(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """All the noise of a rollout in one draw, [*shape, A] standard Gumbel."""
        return jax.random.gumbel(key, (*shape, self.num_actions))

    def sample(self, dist_params: jax.Array, noise: jax.Array) -> jax.Array:
        """argmax(logits + Gumbel noise), an exact categorical sample, [...] int32.

        NaN logits give a valid action, so a diverged run goes on and `Metrics.all_finite` reports it.
        """
        return jnp.argmax(dist_params + noise, axis=-1).astype(jnp.int32)

    def to_env(self, action: jax.Array) -> jax.Array:
        """The action itself."""
        return action


class Choice(NamedTuple):
    """A categorical choice; a logit of -inf is of what is never taken."""

    logits: jax.Array  # [..., A] float32, up to a constant

    def log_prob(self, action: jax.Array) -> jax.Array:
        """[...] int32 -> [...], nats."""
        taken = jax.nn.one_hot(action, self.logits.shape[-1], dtype=bool)
        return ops.sum_choices(jnp.where(taken, ops.log_softmax(self.logits), 0.0))

    def entropy(self) -> jax.Array:
        """[...], nats."""
        log_probs = ops.log_softmax(self.logits)
        probs = jnp.exp(log_probs)
        return -ops.sum_choices(probs * jnp.where(probs > 0, log_probs, 0.0))


@dataclasses.dataclass(frozen=True)
class MultiCategorical:
    """One of `sizes[d]` for each component d; dist_params are all logits in turn; an action is [..., D] int32."""

    sizes: tuple[int, ...]

    @property
    def num_params(self) -> int:
        return sum(self.sizes)

    def components(self, dist_params: jax.Array) -> list[jax.Array]:
        """The logits of each component."""
        return jnp.split(dist_params, np.cumsum(self.sizes)[:-1], axis=-1)

    def distribution(self, dist_params: jax.Array) -> "Components":
        """dist_params [..., P] -> log_prob(action) and entropy(), both summed over the components, [...], nats."""
        return Components([Choice(logits) for logits in self.components(dist_params)])

    def kl(self, old_dist_params: jax.Array, new_dist_params: jax.Array) -> jax.Array:
        """The exact KL(old || new) of two [..., P], [...] float32, nats."""
        pairs = zip(self.components(old_dist_params), self.components(new_dist_params), strict=True)
        return jnp.stack([ops.kl_categorical(old, new) for old, new in pairs]).sum(0)

    def draw_noise(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """All the noise of a rollout in one draw, [*shape, P] standard Gumbel."""
        return jax.random.gumbel(key, (*shape, self.num_params))

    def sample(self, dist_params: jax.Array, noise: jax.Array) -> jax.Array:
        """As of `Categorical`, each component by itself, [..., D] int32."""
        perturbed = self.components(dist_params + noise)
        return jnp.stack([jnp.argmax(logits, axis=-1) for logits in perturbed], axis=-1).astype(jnp.int32)

    def to_env(self, action: jax.Array) -> jax.Array:
        """The action itself."""
        return action


class Components(NamedTuple):
    """Independent categorical choices made at once."""

    parts: list[Choice]

    def log_prob(self, action: jax.Array) -> jax.Array:
        """[..., D] -> [...], the sum over the components."""
        return jnp.stack([part.log_prob(action[..., d]) for d, part in enumerate(self.parts)]).sum(0)

    def entropy(self) -> jax.Array:
        """[...], the sum over the components."""
        return jnp.stack([part.entropy() for part in self.parts]).sum(0)


@dataclasses.dataclass(frozen=True)
class Normal:
    """A diagonal normal; dist_params are means and log standard deviations, P = 2 D; an action is [..., D] float32.

    Attributes:
      low, high: bounds of the environment's actions, D numbers each.
      rescale: whether -1 and 1 stand for the bounds; otherwise actions are in the environment's own units.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    rescale: bool = False

    @property
    def num_params(self) -> int:
        return 2 * len(self.low)

    def distribution(self, dist_params: jax.Array) -> "distrax.Independent":
        """dist_params [..., P] -> log_prob(action) and entropy(), both summed over the dimensions, [...], nats."""
        import distrax

        mean, log_std = jnp.split(dist_params, 2, axis=-1)
        return distrax.Independent(distrax.Normal(mean, jnp.exp(log_std)), 1)

    def kl(self, old_dist_params: jax.Array, new_dist_params: jax.Array) -> jax.Array:
        """The exact KL(old || new) of two [..., P], [...] float32, nats."""
        return ops.kl_normal(*jnp.split(old_dist_params, 2, axis=-1), *jnp.split(new_dist_params, 2, axis=-1))

    def draw_noise(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """All the noise of a rollout in one draw, [*shape, D] standard normal."""
        return jax.random.normal(key, (*shape, len(self.low)))

    def sample(self, dist_params: jax.Array, noise: jax.Array) -> jax.Array:
        """mean + std * noise, [..., D] float32, not clipped."""
        mean, log_std = jnp.split(dist_params, 2, axis=-1)
        return mean + jnp.exp(log_std) * noise

    def to_env(self, action: jax.Array) -> jax.Array:
        """Clipped to the bounds, [..., D]."""
        if self.rescale:
            return _onto_box(jnp.clip(action, -1.0, 1.0), self.low, self.high)
        return jnp.clip(action, jnp.array(self.low), jnp.array(self.high))


@dataclasses.dataclass(frozen=True)
class TanhNormal(Normal):
    """tanh of a diagonal normal, mapped onto the bounds. What is stored is the number before the tanh."""

    def distribution(self, dist_params: jax.Array) -> "Squashed":
        """dist_params [..., P] -> log_prob(pre_tanh) and entropy(), both summed over the dimensions, [...], nats."""
        return Squashed(*jnp.split(dist_params, 2, axis=-1))

    def to_env(self, action: jax.Array) -> jax.Array:
        """tanh, mapped onto the bounds, [..., D]."""
        return _onto_box(jnp.tanh(action), self.low, self.high)


class Squashed(NamedTuple):
    """tanh of a diagonal normal over (-1, 1)^D, for events given before the tanh."""

    mean: jax.Array  # [..., D] float32, before the tanh
    log_std: jax.Array  # [..., D] float32, before the tanh

    def log_prob(self, pre_tanh: jax.Array) -> jax.Array:
        """log density of tanh(pre_tanh), [...]: log N(u) - sum_d log(1 - tanh(u_d)^2), never taken from tanh itself."""
        import distrax

        normal = distrax.Normal(self.mean, jnp.exp(self.log_std))
        return jnp.sum(normal.log_prob(pre_tanh) - log_slope(pre_tanh), axis=-1)

    def entropy(self) -> jax.Array:
        """H(normal) + E[log(1 - tanh(u)^2)], [...]; the expectation by Gauss-Hermite quadrature of 16 nodes.

        There is no closed form. The quadrature is within 1e-4 nats a dimension for standard deviations up to 1, 0.004
        up to 2 and 0.03 up to 3; it takes no random numbers and has a gradient.
        """
        import distrax

        nodes, weights = np.polynomial.hermite_e.hermegauss(16)
        std = jnp.exp(self.log_std)
        pre_tanh = self.mean[..., None] + std[..., None] * jnp.asarray(nodes, jnp.float32)
        slope = log_slope(pre_tanh) @ jnp.asarray(weights / weights.sum(), jnp.float32)
        return jnp.sum(distrax.Normal(self.mean, std).entropy() + slope, axis=-1)


Kind = Categorical | MultiCategorical | Normal | TanhNormal


def make(config: Config, name: str, actions: Discrete | MultiDiscrete | Box) -> Kind:
    """The distribution of this config for the actions of the environment `name`.

    Raises:
      ValueError: for `squash` or `rescale_actions` where there are no bounds to map onto.
    """
    mapped = next((field for field in ("squash", "rescale_actions") if getattr(config, field)), None)
    if not isinstance(actions, Box):
        if mapped:
            raise ValueError(f"config.{mapped} = True: {name} has discrete actions; allowed with bounded Box actions")
        if isinstance(actions, MultiDiscrete):
            return MultiCategorical(actions.sizes)
        return Categorical(actions.num_actions)
    if mapped and not np.isfinite([*actions.low, *actions.high]).all():
        raise ValueError(f"config.{mapped} = True: {name} has unbounded actions; allowed with bounded Box actions")
    if config.squash:
        return TanhNormal(actions.low, actions.high)
    return Normal(actions.low, actions.high, config.rescale_actions)


def log_slope(pre_tanh: jax.Array) -> jax.Array:
    """log(1 - tanh(u)^2) per element, exact where tanh has rounded to 1."""
    import distrax

    return distrax.Tanh().forward_log_det_jacobian(pre_tanh)


def _onto_box(unit: jax.Array, low: tuple[float, ...], high: tuple[float, ...]) -> jax.Array:
    """From [-1, 1] linearly onto the bounds, and no further whatever rounding does."""
    low_, high_ = jnp.array(low), jnp.array(high)
    return jnp.clip(low_ + 0.5 * (unit + 1.0) * (high_ - low_), low_, high_)
