"""Diagnostics."""

import chex
import jax
import jax.numpy as jnp


def explained_variance(predictions: jax.Array, targets: jax.Array) -> jax.Array:
    """1 - Var(targets - predictions) / Var(targets), over all elements; NaN where the targets are all equal.

    1 is a perfect critic, 0 one that predicts a constant; it is blind to a constant error.

    Args:
      predictions: [...] float32.
      targets: [...] float32.

    Returns:
      () float32, without unit.
    """
    chex.assert_equal_shape([predictions, targets])
    variance = jnp.var(targets)
    return jnp.where(variance > 0, 1.0 - jnp.var(targets - predictions) / variance, jnp.nan)


def clip_fraction(log_ratio: jax.Array, clip_eps: jax.typing.ArrayLike) -> jax.Array:
    """Whether a sample has left the clip band, |ratio - 1| > clip_eps.

    Args:
      log_ratio: [...] float32, log pi_new(a|s) - log pi_old(a|s), nats.
      clip_eps: () half width of the band.

    Returns:
      [...] float32, 1 outside the band and 0 inside; its mean is the clip fraction.
    """
    return (jnp.abs(jnp.expm1(log_ratio)) > clip_eps).astype(jnp.float32)
