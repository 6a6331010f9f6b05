"""Hidden layers: of vectors, of images, and with a memory; and how their weights start."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from purejaxppo.agent import products


def orthonormal(key: jax.Array, shapes: Sequence[tuple[int, int]]) -> list[jax.Array]:
    """Matrices with orthonormal rows or columns, whichever are fewer; independent, and uniform over all such.

    Drawn all at once, and those of one shape made side by side: what a program starts with is compiled, too. By
    Gram-Schmidt on Gaussian matrices instead of the usual QR: a batched LAPACK call, which `vmap` makes of QR, waits
    for itself for ever on two-core machines under jaxlib 0.10, and runs one matrix at a time on a GPU.

    Source: Saxe et al. 2014, "Exact solutions to the nonlinear dynamics of learning in deep linear neural networks".
    """
    ends = np.cumsum([rows * columns for rows, columns in shapes])
    normals = jnp.split(jax.random.normal(key, (ends[-1],)), ends[:-1])
    alike: dict[tuple[int, int], list[int]] = {}
    for index, shape in enumerate(shapes):
        alike.setdefault((min(shape), max(shape)), []).append(index)
    bases: dict[int, jax.Array] = {}
    for shape, indices in alike.items():
        vectors = jnp.stack([normals[index].reshape(shape) for index in indices])
        bases |= zip(indices, jax.vmap(_gram_schmidt)(vectors), strict=True)
    return [bases[index] if rows <= columns else bases[index].T for index, (rows, columns) in enumerate(shapes)]


def _gram_schmidt(vectors: jax.Array) -> jax.Array:
    """Linearly independent vectors [K, N] -> an orthonormal basis of what they span, [K, N]."""

    def step(basis: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        vector = vectors[index]
        for _ in range(2):  # once loses orthogonality to rounding; twice is enough (Giraud et al. 2005)
            vector = vector - basis.T @ (basis @ vector)
        return basis.at[index].set(vector / jnp.linalg.norm(vector)), None

    return jax.lax.scan(step, jnp.zeros_like(vectors), jnp.arange(len(vectors)))[0]


class Dense(nn.Module):
    """activation(x W + b): x [..., K] -> [..., size].

    Attributes:
      size: H, outputs.
      scale: of the orthogonal weights at the start; W itself starts full of it, see `ActorCritic.init`.
      activation: name of a `products.function`.
      dtype: of what is multiplied, x and W; the sum with b is float32.
      out_dtype: of the result.
      form: how it is computed: "plain", or by `products` as is fast for learning, "reverse" or "few_passes".
    """

    size: int
    scale: float = 2**0.5
    activation: str = "identity"
    dtype: Any = jnp.float32
    out_dtype: Any = jnp.float32
    form: str = "plain"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", nn.initializers.constant(self.scale), (x.shape[-1], self.size))
        bias = self.param("bias", nn.initializers.zeros, (self.size,))
        x = x.astype(self.dtype)
        if self.form == "few_passes":
            return products.affine(x, kernel, bias, self.activation, self.out_dtype)
        product = products.reverse if self.form == "reverse" and self.dtype == jnp.float32 else products.plain
        outputs = product(x, kernel.astype(self.dtype)) + bias
        return products.function(self.activation)(outputs).astype(self.out_dtype)


class Trunk(nn.Module):
    """The hidden layers: obs [..., O] -> features [..., hidden_sizes[-1]].

    Attributes:
      hidden_sizes: widths.
      activation: name of a `products.function`.
      dtype, form: as of `Dense`; features are of the same type.
    """

    hidden_sizes: tuple[int, ...]
    activation: str
    dtype: Any = jnp.float32
    form: str = "plain"

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        features = obs
        for size in self.hidden_sizes:
            layer = Dense(
                size,
                activation=self.activation,
                dtype=self.dtype,
                out_dtype=self.dtype,
                form=self.form,
            )
            features = layer(features)
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
    dtype: Any = jnp.float32
    form: str = "plain"

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        height, width = self.shape[0] - 2, self.shape[1] - 2
        image = obs.reshape(*obs.shape[:-1], *self.shape)
        shifted = [image[..., i : i + height, j : j + width, :] for i in range(3) for j in range(3)]
        filters = Dense(16, activation=self.activation, dtype=self.dtype, out_dtype=self.dtype, form=self.form)
        features = filters(jnp.concatenate(shifted, axis=-1)).reshape(*obs.shape[:-1], -1)
        return Trunk(self.hidden_sizes, self.activation, self.dtype, self.form)(features)


class RecurrentTrunk(nn.Module):
    """The hidden layers, the last of them a gated recurrent unit.

    Source: Cho et al. 2014, "Learning phrase representations using RNN encoder-decoder".
    """

    hidden_sizes: tuple[int, ...]
    activation: str
    dtype: Any = jnp.float32
    form: str = "plain"

    @nn.compact
    def __call__(self, obs: jax.Array, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
        """obs [..., O], memory [..., H] -> features [..., H], memory after the step."""
        features = Trunk(self.hidden_sizes[:-1], self.activation, self.dtype, self.form)(obs)
        size, init = self.hidden_sizes[-1], nn.initializers.constant(1.0)  # a scale, as of `Dense`
        cell = nn.GRUCell(size, activation_fn=products.function("tanh"), kernel_init=init, recurrent_kernel_init=init)
        memory, features = cell(memory, features)
        return features, memory
