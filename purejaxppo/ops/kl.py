"""Per-sample estimators of KL(old || new) from actions drawn from the old policy.

`log_ratio` is log pi_new(a|s) - log pi_old(a|s), [...] float32, nats; each returns [...] float32, nats.

Source: Schulman 2020, "Approximating KL divergence".
"""

import jax
import jax.numpy as jnp


def kl_k1(log_ratio: jax.Array) -> jax.Array:
    """k1 = -log ratio. Unbiased; negative for about half of the samples."""
    return -log_ratio


def kl_k2(log_ratio: jax.Array) -> jax.Array:
    """k2 = (log ratio)^2 / 2. Biased, never negative, low variance near ratio 1."""
    return 0.5 * log_ratio**2


def kl_k3(log_ratio: jax.Array) -> jax.Array:
    """k3 = (ratio - 1) - log ratio. Unbiased and never negative."""
    return jnp.expm1(log_ratio) - log_ratio
