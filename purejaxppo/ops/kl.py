"""KL(old || new): exact for categorical policies, and per-sample estimators from actions drawn from the old policy.

The `log_ratio` of the estimators is log pi_new(a|s) - log pi_old(a|s), [...] float32, nats; each returns [...] float32,
nats.

Source: Schulman 2020, "Approximating KL divergence".
"""

import chex
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


def kl_categorical(old_logits: jax.Array, new_logits: jax.Array) -> jax.Array:
    """The exact KL(old || new) = sum_a p_old(a) (log p_old(a) - log p_new(a)) of two categorical policies.

    An action that the old policy cannot take adds nothing, whatever the new one does with it: there is no 0 * inf,
    in the value or in its gradient. One that only the new policy cannot take makes it inf.

    Args:
      old_logits: [..., A] float32, up to a constant; -inf for an action that cannot be taken.
      new_logits: [..., A] float32, likewise.

    Returns:
      [...] float32, nats.

    Raises:
      AssertionError: while tracing, when the shapes differ.
    """
    chex.assert_equal_shape([old_logits, new_logits])
    old_log_probs = jax.nn.log_softmax(old_logits)
    new_log_probs = jax.nn.log_softmax(new_logits)
    probs = jnp.exp(old_log_probs)
    taken = probs > 0
    log_ratio = jnp.where(taken, new_log_probs, 0.0) - jnp.where(taken, old_log_probs, 0.0)
    return -jnp.sum(probs * log_ratio, axis=-1)
