"""Sums and log-probabilities over the choices of a categorical policy, the last axis.

Few choices are taken one by one: XLA reduces so short an axis slowly on a CPU, and apart they fuse with what stands
around them. Their derivatives are sums as of many: to take a gradient apart costs an accelerator kernels.
"""

import functools

import jax
import jax.numpy as jnp

FEW = 4


@jax.custom_jvp
def sum_choices(x: jax.Array) -> jax.Array:
    """[..., A] -> [...]."""
    return functools.reduce(jnp.add, _apart(x)) if x.shape[-1] <= FEW else jnp.sum(x, axis=-1)


@sum_choices.defjvp
def _sum_choices_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return sum_choices(*primals), jnp.sum(tangents[0], axis=-1)


@jax.custom_jvp
def log_softmax(logits: jax.Array) -> jax.Array:
    """log p_a = logit_a - log sum_b exp(logit_b), [..., A] -> [..., A], nats; -inf for a logit of -inf."""
    if logits.shape[-1] > FEW:
        return jax.nn.log_softmax(logits)
    shifted = logits - functools.reduce(jnp.maximum, _apart(logits))[..., None]
    return shifted - jnp.log(sum_choices(jnp.exp(shifted)))[..., None]


@log_softmax.defjvp
def _log_softmax_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    log_probs = log_softmax(*primals)
    return log_probs, tangents[0] - jnp.sum(jnp.exp(log_probs) * tangents[0], axis=-1, keepdims=True)


def _apart(x: jax.Array) -> list[jax.Array]:
    return [x[..., i] for i in range(x.shape[-1])]
