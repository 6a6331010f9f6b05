"""Running moments, and diagnostics."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

LIMIT = 10.0  # normalised numbers lie within this many standard deviations


class Moments(NamedTuple):
    """Count, mean and variance of samples seen so far, each element of a sample on its own."""

    count: jax.Array  # type: ignore[assignment]  # () float32, samples (tuple.count has no other use here)
    mean: jax.Array  # [...] float32
    m2: jax.Array  # [...] float32, sum of the squared distances from the mean

    @property
    def variance(self) -> jax.Array:
        """[...] float32, of the population."""
        return self.m2 / self.count


def moments(samples: jax.Array) -> Moments:
    """The moments over the first axis, taken relative to the first sample, so that a large mean costs no digits.

    Args:
      samples: [B, ...] float32.
    """
    shifted = samples - samples[0]
    offset = shifted.mean(0)
    m2 = jnp.sum((shifted - offset) ** 2, axis=0)
    return Moments(jnp.full((), samples.shape[0], jnp.float32), samples[0] + offset, m2)


def merge_moments(a: Moments, b: Moments) -> Moments:
    """The moments of the samples of both, whichever came first.

    Source: Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance", eq. 2.1.
    """
    chex.assert_equal_shape([a.mean, b.mean, a.m2, b.m2])
    count = a.count + b.count
    share = b.count / count
    delta = b.mean - a.mean
    return Moments(count, a.mean + share * delta, a.m2 + b.m2 + delta**2 * a.count * share)


def standard_score(stats: Moments, x: jax.Array) -> jax.Array:
    """(x - mean) / std, held within -10 and 10.

    Args:
      x: [..., *shape of the mean] float32.

    Returns:
      Like x, without unit.
    """
    return jnp.clip((x - stats.mean) / jnp.sqrt(stats.variance + 1e-8), -LIMIT, LIMIT)


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
