"""Steps measured in behaviour instead of parameters: on any pytree of parameters, by products with F alone.

Parameters, gradients and steps are pytrees of one structure, float32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Params = Any


def inner(a: Params, b: Params) -> jax.Array:
    """The inner product over all leaves, () float32."""
    return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, a, b)), start=jnp.zeros((), jnp.float32))


def fisher_vector_product(
    mean_kl: Callable[[Params], jax.Array], params: Params, vector: Params, damping: jax.typing.ArrayLike = 0.0
) -> Params:
    """(F + damping * I) v, where F is the Hessian of the mean KL at `params`, never formed.

    At the parameters of the old policy this Hessian is the Fisher information matrix, E[score score'].

    Args:
      mean_kl: params -> () mean KL(old || new), nats; what stands for the old policy in it must be constant. (A KL of
        a policy to itself that lets both sides move has Hessian zero.)
      params: where to differentiate.
      vector: v, like params.
      damping: () added to the diagonal.

    Returns:
      Like params.

    Source: Schulman et al. 2015, "Trust region policy optimization", appendix C.1.
    """
    product = jax.jvp(jax.grad(mean_kl), (params,), (vector,))[1]
    return jax.tree.map(lambda p, v: p + damping * v, product, vector)


def conjugate_gradient(product: Callable[[Params], Params], target: Params, num_iters: int) -> Params:
    """x with A x = target, for a symmetric positive definite A known by its products; a fixed number of iterations.

    Exact after as many iterations as A has distinct eigenvalues, up to rounding. Once the residual is gone, or a
    direction has no curvature left, x stays as it is: a zero target gives exactly zero.

    Args:
      product: v -> A v.
      target: like params.
      num_iters: at most; static.

    Returns:
      x, like target.

    Source: Hestenes and Stiefel 1952, "Methods of conjugate gradients for solving linear systems".
    """
    squared = inner(target, target)
    tolerance = 1e-10 * squared

    def step(carry: tuple[Params, Params, Params, jax.Array], _: None) -> tuple[Any, None]:
        x, residual, direction, squared = carry
        image = product(direction)
        curvature = inner(direction, image)
        going = (squared > tolerance) & (curvature > 0)
        alpha = jnp.where(going, squared / jnp.where(going, curvature, 1.0), 0.0)
        x = jax.tree.map(lambda x, d: x + alpha * d, x, direction)
        residual = jax.tree.map(lambda r, i: r - alpha * i, residual, image)
        next_squared = inner(residual, residual)
        beta = jnp.where(going, next_squared / jnp.where(going, squared, 1.0), 0.0)
        direction = jax.tree.map(lambda r, d: r + beta * d, residual, direction)
        return (x, residual, direction, next_squared), None

    start = jax.tree.map(jnp.zeros_like, target)
    return jax.lax.scan(step, (start, target, target, squared), length=num_iters)[0][0]


def natural_step(direction: Params, product: Callable[[Params], Params], max_kl: jax.typing.ArrayLike) -> Params:
    """The longest step along x = F^-1 g that the quadratic model of the KL allows: sqrt(2 max_kl / x'Fx) x.

    Exactly zero where x is zero, or where the step would not be finite.

    Args:
      direction: x, like params.
      product: v -> F v.
      max_kl: () bound on the mean KL, nats.

    Returns:
      Like params.

    Source: Kakade 2001, "A natural policy gradient"; Schulman et al. 2015, "Trust region policy optimization",
    appendix C.
    """
    curvature = inner(direction, product(direction))
    usable = (curvature > 0) & jnp.isfinite(curvature)
    scale = jnp.where(usable, jnp.sqrt(2.0 * max_kl / jnp.where(usable, curvature, 1.0)), 0.0)
    return jax.tree.map(lambda d: jnp.where(usable, scale * d, 0.0), direction)


def backtracking_line_search(
    evaluate: Callable[[Params], tuple[jax.Array, jax.Array]],
    params: Params,
    step: Params,
    max_kl: jax.typing.ArrayLike,
    backtrack_coef: jax.typing.ArrayLike,
    num_iters: int,
) -> tuple[Params, jax.Array]:
    """The longest of params + backtrack_coef^j * step, j = 0, 1, ..., that keeps to the KL bound and improves.

    A candidate whose surrogate or KL is not finite is never taken. If none will do the parameters stay, bit by bit.

    Args:
      evaluate: params -> (surrogate, mean KL(old || new)), () each, on the batch that the step was computed on.
      params: where to start; the old policy.
      step: like params.
      max_kl: () bound on the mean KL, nats.
      backtrack_coef: () factor between candidates, in (0, 1).
      num_iters: number of candidates; static.

    Returns:
      Parameters, and the accepted fraction of the step, () float32, 0 where none was.

    Source: Schulman et al. 2015, "Trust region policy optimization", appendix C.
    """
    old_surrogate, _ = evaluate(params)

    def consider(accepted: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        fraction = jnp.asarray(backtrack_coef, jnp.float32) ** index
        surrogate, kl = evaluate(_moved(params, step, fraction))
        good = (surrogate > old_surrogate) & jnp.isfinite(surrogate) & (kl <= max_kl)
        return jnp.where((accepted == 0) & good, fraction, accepted), None

    accepted, _ = jax.lax.scan(consider, jnp.zeros((), jnp.float32), jnp.arange(num_iters))
    moved = _moved(params, step, accepted)
    return jax.tree.map(lambda new, old: jnp.where(accepted > 0, new, old), moved, params), accepted


def _moved(params: Params, step: Params, fraction: jax.Array) -> Params:
    return jax.tree.map(lambda p, s: p + fraction * s, params, step)
