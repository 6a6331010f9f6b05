"""KL(old || new): exact for categorical policies, and per-sample estimators from actions drawn from the old policy.

The `log_ratio` of the estimators is log pi_new(a|s) - log pi_old(a|s), [...] float32, nats; each returns [...] float32,
nats.

Source: Schulman 2020, "Approximating KL divergence".
"""

import chex
import jax
import jax.numpy as jnp

from purejaxppo.ops.choices import log_softmax, sum_choices


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
    old_log_probs = log_softmax(old_logits)
    new_log_probs = log_softmax(new_logits)
    probs = jnp.exp(old_log_probs)
    taken = probs > 0
    log_ratio = jnp.where(taken, new_log_probs, 0.0) - jnp.where(taken, old_log_probs, 0.0)
    return -sum_choices(probs * log_ratio)


def kl_normal(old_mean: jax.Array, old_log_std: jax.Array, new_mean: jax.Array, new_log_std: jax.Array) -> jax.Array:
    """The exact KL(old || new) of two diagonal normal policies, summed over the action dimensions.

    KL = sum_d log(s_new / s_old) + (s_old^2 + (m_old - m_new)^2) / (2 s_new^2) - 1/2. For KL(new || old) swap the
    arguments: it is another number.

    Args:
      old_mean, new_mean: [..., D] float32.
      old_log_std, new_log_std: [..., D] float32, log standard deviations.

    Returns:
      [...] float32, nats.

    Raises:
      AssertionError: while tracing, when the shapes differ.
    """
    chex.assert_equal_shape([old_mean, old_log_std, new_mean, new_log_std])
    shrink = old_log_std - new_log_std
    distance = (old_mean - new_mean) * jnp.exp(-new_log_std)
    return jnp.sum(0.5 * (jnp.expm1(2.0 * shrink) + distance**2) - shrink, axis=-1)


MIN_KL_COEF, MAX_KL_COEF = 1e-6, 1e6


def adapt_kl_coef(
    kl_coef: jax.Array, kl: jax.Array, kl_target: jax.typing.ArrayLike, factor: jax.typing.ArrayLike
) -> jax.Array:
    """The coefficient of the KL penalty for the next update, from the KL that this one led to.

    kl < kl_target / 1.5 divides it by `factor`, kl > 1.5 * kl_target multiplies; it moves no further than 1e-6 and 1e6,
    so that it neither overflows nor becomes too small to come back. 0 stays 0, and so switches the penalty off.

    Args:
      kl_coef: () float32, of this update.
      kl: () float32, measured mean KL(old || new), nats. One that is not finite counts as too large.
      kl_target: () nats.
      factor: () at least 1; 1 keeps the coefficient.

    Returns:
      () float32.

    Source: Schulman et al. 2017, "Proximal policy optimization algorithms", section 4.
    """
    smaller = jnp.maximum(kl_coef / factor, jnp.minimum(kl_coef, MIN_KL_COEF))
    larger = jnp.minimum(kl_coef * factor, jnp.maximum(kl_coef, MAX_KL_COEF))
    return jnp.where(kl < kl_target / 1.5, smaller, jnp.where(kl <= 1.5 * kl_target, kl_coef, larger))
