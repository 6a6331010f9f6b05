"""Adam on clipped gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

BETA_1, BETA_2 = 0.9, 0.999


def clipped_adam(
    learning_rate: jax.typing.ArrayLike, max_grad_norm: jax.typing.ArrayLike, eps: jax.typing.ArrayLike
) -> optax.GradientTransformation:
    """optax's Adam on gradients clipped by their global norm: its state, and its updates up to rounding.

    What is a number of the step and not of an element, the clipping and the corrections of the moments, is worked out
    once: a division and a square root an element are left of six divisions and a square root.

    Args:
      learning_rate, max_grad_norm, eps: () float32.

    Source: Kingma and Ba 2015, "Adam: a method for stochastic optimization", end of section 2.
    """
    chain = optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        optax.scale_by_adam(b1=BETA_1, b2=BETA_2, eps=eps),
        optax.scale_by_learning_rate(learning_rate),
    )

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        clipped, adam, scaled = state
        norm = optax.tree.norm(grads)
        clip = jnp.where(norm < max_grad_norm, 1.0, max_grad_norm / norm)
        count = optax.safe_increment(adam.count)
        correction = jnp.sqrt(1.0 - BETA_2**count)
        step_size = learning_rate * correction / (1.0 - BETA_1**count)
        step_eps = eps * correction

        def first_moment(grad: jax.Array, mu: jax.Array) -> jax.Array:
            return (1.0 - BETA_1) * (clip * grad) + BETA_1 * mu

        def second_moment(grad: jax.Array, nu: jax.Array) -> jax.Array:
            return (1.0 - BETA_2) * jnp.square(clip * grad) + BETA_2 * nu

        mu = jax.tree.map(first_moment, grads, adam.mu)
        nu = jax.tree.map(second_moment, grads, adam.nu)
        updates = jax.tree.map(lambda mu, nu: -step_size * mu / (jnp.sqrt(nu) + step_eps), mu, nu)
        return updates, (clipped, adam._replace(count=count, mu=mu, nu=nu), scaled)

    return optax.GradientTransformation(chain.init, update)
