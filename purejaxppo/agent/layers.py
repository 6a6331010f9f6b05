"""Hidden layers: of vectors, of images, and with a memory; and how their weights start."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.nn.initializers import Initializer


def orthogonal(scale: float) -> Initializer:
    """Orthogonal rows or columns, whichever are fewer, times `scale`; uniform over all such matrices.

    By Gram-Schmidt on a Gaussian matrix instead of the usual QR: a batched LAPACK call, which `vmap` makes of QR,
    waits for itself for ever on two-core machines under jaxlib 0.10, and runs one matrix at a time on a GPU.

    Source: Saxe et al. 2014, "Exact solutions to the nonlinear dynamics of learning in deep linear neural networks".
    """

    def init(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32, out_sharding: Any = None) -> jax.Array:
        del out_sharding
        columns = jax.random.normal(key, (min(shape), max(shape)), dtype)

        def step(basis: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
            column = columns[index]
            for _ in range(2):  # once loses orthogonality to rounding; twice is enough (Giraud et al. 2005)
                column = column - basis.T @ (basis @ column)
            return basis.at[index].set(column / jnp.linalg.norm(column)), None

        basis, _ = jax.lax.scan(step, jnp.zeros_like(columns), jnp.arange(min(shape)))
        return scale * (basis if shape[0] <= shape[1] else basis.T)

    return init


class Trunk(nn.Module):
    """The hidden layers: obs [..., O] -> features [..., hidden_sizes[-1]]."""

    hidden_sizes: tuple[int, ...]
    activation: str

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        features = obs
        for size in self.hidden_sizes:
            features = nn.Dense(size, kernel_init=orthogonal(2**0.5))(features)
            features = getattr(jax.nn, self.activation)(features)
        return features


class ImageTrunk(nn.Module):
    """A convolution of 3 x 3, then the hidden layers: obs [..., O] -> features [..., hidden_sizes[-1]].

    The convolution is one matrix product on the nine neighbours of every pixel. As a convolution, `vmap` over runs
    would make a grouped one of it, which is far slower.

    Source: Young and Tian 2019, "MinAtar", for its size of 16 filters.
    """

    shape: tuple[int, ...]  # (height, width, channels)
    hidden_sizes: tuple[int, ...]
    activation: str

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        height, width = self.shape[0] - 2, self.shape[1] - 2
        image = obs.reshape(*obs.shape[:-1], *self.shape)
        shifted = [image[..., i : i + height, j : j + width, :] for i in range(3) for j in range(3)]
        features = nn.Dense(16, kernel_init=orthogonal(2**0.5))(jnp.concatenate(shifted, axis=-1))
        features = getattr(jax.nn, self.activation)(features).reshape(*obs.shape[:-1], -1)
        return Trunk(self.hidden_sizes, self.activation)(features)


class RecurrentTrunk(nn.Module):
    """The hidden layers, the last of them a gated recurrent unit.

    Source: Cho et al. 2014, "Learning phrase representations using RNN encoder-decoder".
    """

    hidden_sizes: tuple[int, ...]
    activation: str

    @nn.compact
    def __call__(self, obs: jax.Array, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
        """obs [..., O], memory [..., H] -> features [..., H], memory after the step."""
        features = Trunk(self.hidden_sizes[:-1], self.activation)(obs)
        # The default initialiser of the unit is the LAPACK one that may hang; see `orthogonal`.
        size, init = self.hidden_sizes[-1], orthogonal(1.0)
        memory, features = nn.GRUCell(size, kernel_init=init, recurrent_kernel_init=init)(memory, features)
        return features, memory
