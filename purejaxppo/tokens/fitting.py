"""Fitting a model to data: AdamW on minibatches drawn with replacement. One scan, for `jit` and `vmap`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from purejaxppo.config import check_size


class Fit(NamedTuple):
    """How long and how fast.

    Attributes:
      num_steps: optimiser steps, over which the learning rate falls linearly to 0.
      batch_size: rows of a step.
      learning_rate: of step 0.
      weight_decay: decoupled, as in AdamW.
    """

    num_steps: int = 2000
    batch_size: int = 128
    learning_rate: float = 3e-3
    weight_decay: float = 0.0


def check(name: str, fit: Fit) -> None:
    """Raises ValueError, naming the field as `name.field`, for a size or rate that is not allowed."""
    check_size(f"{name}.num_steps", fit.num_steps)
    check_size(f"{name}.batch_size", fit.batch_size)
    for field in ("learning_rate", "weight_decay"):
        value = getattr(fit, field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ValueError(f"{name}.{field} = {value!r}: must be a number in [0, inf)")


def descend(
    loss: Callable[[Any, Any], jax.Array],
    params: Any,
    data: Any,
    num_rows: jax.typing.ArrayLike,
    key: jax.Array,
    fit: Fit,
) -> tuple[Any, jax.Array]:
    """Minimises a mean over rows of data.

    Args:
      loss: (params, rows) -> () float32.
      params: to start from.
      data: leaves [N, ...].
      num_rows: () at most N, of which rows are drawn; traced, so that few rows and many are one program.
      key: () typed key.
      fit: static.

    Returns:
      Parameters, and the loss at each step [num_steps] float32.
    """
    uniforms = jax.random.uniform(key, (fit.num_steps, fit.batch_size))
    last = jnp.asarray(num_rows, jnp.int32) - 1
    rows = jnp.minimum((uniforms * num_rows).astype(jnp.int32), last)
    data = jax.tree.map(jnp.asarray, data)
    optimizer = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(fit.weight_decay))

    def step(carry: tuple, inputs: tuple) -> tuple[tuple, jax.Array]:
        params, opt_state = carry
        index, rows = inputs
        value, gradient = jax.value_and_grad(loss)(params, jax.tree.map(lambda leaf: leaf[rows], data))
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        rate = fit.learning_rate * (1.0 - index / fit.num_steps)
        return (jax.tree.map(lambda p, u: p - rate * u, params, updates), opt_state), value

    start = (params, optimizer.init(params))
    (params, _), losses = jax.lax.scan(step, start, (jnp.arange(fit.num_steps), rows))
    return params, losses
