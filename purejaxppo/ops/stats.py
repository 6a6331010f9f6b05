"""Diagnostics."""

import chex
import jax
import jax.numpy as jnp


def centre(x: jax.Array) -> jax.Array:
    """x minus its mean over all elements, [...] float32.

    Equal values give exact zeros, also where rounding puts their mean beside them: they are first taken relative to
    one of them, which changes nothing else.
    """
    shifted = x - x.reshape(-1)[0]
    return shifted - shifted.mean()


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
    unexplained = jnp.mean(centre(targets - predictions) ** 2)
    variance = jnp.mean(centre(targets) ** 2)
    return jnp.where(variance > 0, 1.0 - unexplained / variance, jnp.nan)


def clip_fraction(log_ratio: jax.Array, clip_eps: jax.typing.ArrayLike) -> jax.Array:
    """Whether a sample has left the clip band, |ratio - 1| > clip_eps.

    Args:
      log_ratio: [...] float32, log pi_new(a|s) - log pi_old(a|s), nats.
      clip_eps: () half width of the band.

    Returns:
      [...] float32, 1 outside the band and 0 inside; its mean is the clip fraction.
    """
    return (jnp.abs(jnp.expm1(log_ratio)) > clip_eps).astype(jnp.float32)
