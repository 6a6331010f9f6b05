"""Adam on clipped gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

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


class Packing:
    """Small leaves of a tree gathered into one vector: of many small arrays each would cost a program kernels.

    Optimisers work on packed trees as on any other. Packing and unpacking change no bit.

    Args:
      tree: arrays, as all that are packed later; float32.
      limit: elements that a small leaf has at most.
    """

    def __init__(self, tree: Any, limit: int) -> None:
        leaves, self._structure = jax.tree.flatten(tree)
        self._is_small = [leaf.size <= limit for leaf in leaves]
        vector, self._unravel = ravel_pytree(self._chosen(leaves, True))
        self._packed_structure = jax.tree.structure((vector, self._chosen(leaves, False)))

    def pack(self, tree: Any) -> tuple[jax.Array, list[jax.Array]]:
        """The small leaves [elements], and the others as they are."""
        leaves = jax.tree.leaves(tree)
        return ravel_pytree(self._chosen(leaves, True))[0], self._chosen(leaves, False)

    def unpack(self, packed: tuple[jax.Array, list[jax.Array]]) -> Any:
        """The tree of which `pack` made this."""
        small, large = iter(self._unravel(packed[0])), iter(packed[1])
        return jax.tree.unflatten(self._structure, [next(small if is_small else large) for is_small in self._is_small])

    def pack_all(self, state: Any) -> Any:
        """An optimiser's state with all in it that looks like the tree packed."""
        return _map_like(self._structure, self.pack, state)

    def unpack_all(self, state: Any) -> Any:
        """The state of which `pack_all` made this."""
        return _map_like(self._packed_structure, self.unpack, state)

    def _chosen(self, leaves: list[jax.Array], is_small: bool) -> list[jax.Array]:
        return [leaf for leaf, small in zip(leaves, self._is_small, strict=True) if small == is_small]


def _map_like(structure: Any, function: Callable[[Any], Any], tree: Any) -> Any:
    """Applies a function to every subtree of that structure."""

    def found(node: Any) -> bool:
        return bool(jax.tree.structure(node) == structure)

    return jax.tree.map(lambda node: function(node) if found(node) else node, tree, is_leaf=found)
