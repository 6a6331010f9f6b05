"""Objectives and losses, per element."""

import chex
import jax
import jax.numpy as jnp


def surrogate(log_ratio: jax.Array, advantages: jax.Array) -> jax.Array:
    """The unclipped surrogate, ratio * A, to be maximised. At ratio 1 its gradient is the policy gradient.

    Args:
      log_ratio: [...] float32, log pi_new(a|s) - log pi_old(a|s), nats.
      advantages: [...] float32.

    Returns:
      [...] float32, in units of the advantages.

    Source: Schulman et al. 2015, "Trust region policy optimization", eq. 14.
    """
    chex.assert_equal_shape([log_ratio, advantages])
    return jnp.exp(log_ratio) * advantages


def clipped_surrogate(log_ratio: jax.Array, advantages: jax.Array, clip_eps: jax.typing.ArrayLike) -> jax.Array:
    """The PPO-clip objective, min(ratio * A, clip(ratio, 1 - eps, 1 + eps) * A), to be maximised.

    Its gradient is zero where a good action's ratio is above 1 + eps or a bad action's below 1 - eps; elsewhere it is
    that of `surrogate`, of which it is a lower bound. `clip_eps=inf` gives `surrogate` itself.

    Args:
      log_ratio: [...] float32, log pi_new(a|s) - log pi_old(a|s), nats.
      advantages: [...] float32.
      clip_eps: () half width of the band around ratio 1.

    Returns:
      [...] float32, in units of the advantages.

    Source: Schulman et al. 2017, "Proximal policy optimization algorithms", eq. 7.
    """
    chex.assert_equal_shape([log_ratio, advantages])
    ratio = jnp.exp(log_ratio)
    return jnp.minimum(ratio * advantages, jnp.clip(ratio, 1.0 - clip_eps, 1.0 + clip_eps) * advantages)


def value_loss(value: jax.Array, value_targets: jax.Array) -> jax.Array:
    """Half the squared error of the critic, (v - R)^2 / 2.

    Args:
      value: [...] float32.
      value_targets: [...] float32.

    Returns:
      [...] float32, in units of return squared.
    """
    chex.assert_equal_shape([value, value_targets])
    return 0.5 * (value - value_targets) ** 2


def clipped_value_loss(
    value: jax.Array, old_value: jax.Array, value_targets: jax.Array, clip_eps: jax.typing.ArrayLike
) -> jax.Array:
    """The pessimistic value loss, max((v - R)^2, (clip(v, v_old - eps, v_old + eps) - R)^2) / 2.

    `clip_eps=inf` gives `value_loss` exactly.

    Args:
      value: [...] float32.
      old_value: [...] float32, at sampling time.
      value_targets: [...] float32.
      clip_eps: () half width of the band around the old value, in units of return.

    Returns:
      [...] float32, in units of return squared.

    Source: Huang et al. 2022, "The 37 implementation details of proximal policy optimization", detail 9.
    """
    chex.assert_equal_shape([value, old_value, value_targets])
    near = jnp.clip(value, old_value - clip_eps, old_value + clip_eps)
    return jnp.maximum(value_loss(value, value_targets), value_loss(near, value_targets))
