"""The matrix product of a layer, and its derivatives as a CPU computes them fast or in few passes over activations.

Where many small networks learn at once, an accelerator waits for memory and not for arithmetic: a minibatch costs what
its activations [H, B] are read and written. So samples stand last, sums over them run along rows, and a product with
few inputs or outputs has gradients that are sums, which fuse with what stands around them. The formulas are those of
`activation(x @ kernel + bias)`, and so is the derivative of any order.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from purejaxppo import devices, ops

FEW = 8  # inputs or outputs
FEW_ON_CPU = 4  # inputs or outputs that a CPU is faster with one at a time

# The derivative of an activation, where its output tells.
SLOPES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "tanh": ops.tanh_slope,
    "relu": lambda outputs: (outputs > 0).astype(outputs.dtype),
    "elu": lambda outputs: jnp.where(outputs > 0, 1.0, outputs + 1.0),
}


def function(activation: str) -> Callable[[jax.Array], jax.Array]:
    """The activation of that name: our own on a CPU, which is faster there, or of `jax.nn`."""
    if activation == "tanh" and not devices.on_accelerator():
        return ops.tanh
    return cast(Callable, getattr(jax.nn, activation))


def plain(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x kernel: [..., K] and [K, H] -> [..., H] float32; of few outputs a product with each column of the kernel."""
    if kernel.shape[1] > FEW_ON_CPU:
        return jnp.matmul(x, kernel, preferred_element_type=jnp.float32)
    columns = (kernel[:, i] for i in range(kernel.shape[1]))
    return jnp.stack([jnp.matmul(x, column, preferred_element_type=jnp.float32) for column in columns], axis=-1)


def reverse(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """As `plain` for float32, with derivatives in reverse mode alone."""
    return plain(x, kernel) if kernel.shape[1] <= FEW_ON_CPU else _reverse(x, kernel)


@jax.custom_vjp
def _reverse(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Of few inputs a sum with a term for each, which fuses with the activation that follows."""
    if len(kernel) > FEW_ON_CPU:
        return plain(x, kernel)
    return functools.reduce(jnp.add, [x[..., i : i + 1] * row for i, row in enumerate(kernel)])


def _reverse_forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _reverse(x, kernel), (x, kernel)


def _reverse_backward(kept: tuple[jax.Array, jax.Array], grads: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The kernel's gradient is a product of x transposed, which XLA computes faster than a sum over both first axes.

    Turned over as integers, since XLA would make that sum of it again; where runs are batched, it does all the same.
    The kernel itself is not turned over for the gradient of x, since one run's would be copied.
    """
    x, kernel = kept
    whole = jax.lax.bitcast_convert_type(x.reshape(-1, x.shape[-1]), jnp.int32)
    transposed = jax.lax.bitcast_convert_type(whole.T, jnp.float32)
    return jnp.einsum("...h,kh->...k", grads, kernel), transposed @ grads.reshape(-1, grads.shape[-1])


_reverse.defvjp(_reverse_forward, _reverse_backward)


def affine(x: jax.Array, kernel: jax.Array, bias: jax.Array, activation: str, dtype: Any) -> jax.Array:
    """activation(x kernel + bias), the product of x with the kernel rounded to its type, the rest in float32.

    Args:
      x: [..., K] float32 or bfloat16.
      kernel: [K, H] float32.
      bias: [H] float32.
      activation: one that `function` knows.
      dtype: of the result.

    Returns:
      [..., H].
    """
    columns = x.reshape(-1, x.shape[-1]).T
    if len(kernel) <= FEW and activation in SLOPES:
        ones = jnp.ones((1, columns.shape[1]), x.dtype)
        augmented = jnp.concatenate([kernel, bias[None]])
        outputs = few_inputs(jnp.concatenate([columns, ones]), augmented, activation, dtype)
    else:
        product = few_outputs if kernel.shape[1] <= FEW else many
        outputs = activate(product(columns, kernel) + bias[:, None], activation, dtype)
    return outputs.T.reshape(*x.shape[:-1], -1)


@jax.custom_jvp
def many(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """kernel' x: [K, B] and [K, H] float32 -> [H, B] float32. Gradients that are multiplied are of the type of x."""
    return jnp.matmul(kernel.astype(x.dtype).T, x, preferred_element_type=jnp.float32)


@many.defjvp
def _many_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    def linear(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return (kernel.astype(x.dtype).T @ x).astype(jnp.float32)

    x, kernel = primals
    return many(x, kernel), linear(tangents[0], kernel) + linear(x, tangents[1])


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def activate(x: jax.Array, activation: str, dtype: Any) -> jax.Array:
    """The activation of x in `dtype`; for its derivative nothing else is kept, where its output tells."""
    return function(activation)(x).astype(dtype)


@activate.defjvp
def _activate_jvp(activation: str, dtype: Any, primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    if activation not in SLOPES:
        return jax.jvp(lambda x: function(activation)(x).astype(dtype), primals, tangents)
    outputs = activate(*primals, activation, dtype)
    return outputs, (tangents[0] * SLOPES[activation](outputs.astype(jnp.float32))).astype(dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def few_inputs(x: jax.Array, kernel: jax.Array, activation: str, dtype: Any) -> jax.Array:
    """activation(kernel' x) of few inputs: the gradient of the kernel is one pass over the outputs and theirs.

    Args:
      x: [K, B].
      kernel: [K, H] float32.
      activation: one of `SLOPES`.
      dtype: of the result.

    Returns:
      [H, B].
    """
    return activate(many(x, kernel), activation, dtype)


@few_inputs.defjvp
def _few_inputs_jvp(activation: str, dtype: Any, primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> Any:
    x, kernel = primals
    outputs = few_inputs(x, kernel, activation, dtype)
    # The slopes are multiplied in before the sum, and from repeated outputs: a gradient times the slopes alone would be
    # an array of its own, written and read again.
    slopes = SLOPES[activation](jnp.broadcast_to(outputs.astype(jnp.float32), (len(x), *outputs.shape)))

    def linear(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.sum((kernel[:, :, None] * slopes) * x[:, None], axis=0).astype(dtype)

    return outputs, linear(tangents[0], kernel) + linear(x, tangents[1])


@jax.custom_jvp
def few_outputs(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """kernel' x of few outputs: both gradients fuse with what stands around them.

    Args and Returns: as `many`.
    """
    return many(x, kernel)


@few_outputs.defjvp
def _few_outputs_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    # The barrier keeps the gradient of the outputs an array. It is small, but what computes it is not, and would be
    # repeated for every input.
    def linear(x: jax.Array, kernel: jax.Array) -> jax.Array:
        sums = [jnp.sum(x * kernel[:, i, None], axis=0) for i in range(kernel.shape[1])]
        return jax.lax.optimization_barrier(jnp.stack(sums))

    x, kernel = primals
    return many(x, kernel), linear(tangents[0], kernel) + linear(x, tangents[1])
