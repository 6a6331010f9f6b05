"""The products of layers against the plain formula: values, and derivatives in every mode and order."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purejaxppo.agent import layers, products

SHAPES = [(4, 16), (16, 2), (16, 12), (3, 1), (12, 1)]
ACTIVATIONS = ["tanh", "relu", "elu", "gelu", "identity"]


def inputs(shape, batch=(5,)):
    """Of a size that leaves no tanh near 1, where its last digit is all that there is of its derivative."""
    keys = jax.random.split(jax.random.key(0), 3)
    kernel, bias = (
        0.5 * shape[0] ** -0.5 * jax.random.normal(keys[0], shape),
        0.5 * jax.random.normal(keys[1], shape[1:]),
    )
    return jax.random.normal(keys[2], (*batch, shape[0])), kernel, bias


def plain(x, kernel, bias, activation):
    return getattr(jax.nn, activation)(x @ kernel + bias)


def objective(function, *arguments):
    return jnp.sum(jnp.sin(function(*arguments)))


def both(activation):
    return (
        functools.partial(products.affine, activation=activation, dtype=jnp.float32),
        functools.partial(plain, activation=activation),
    )


def assert_close(actual, expected, tolerance=2e-6):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_and_all_gradients_are_those_of_the_plain_formula(activation):
    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(function, *arguments):
        return function(*arguments), jax.grad(functools.partial(objective, function), (0, 1, 2))(*arguments)

    ours, expected = both(activation)
    for shape in SHAPES:
        arguments = inputs(shape)
        assert_close(derivatives(ours, *arguments), derivatives(expected, *arguments))


@pytest.mark.parametrize("product", [products.plain, products.reverse])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_for_a_cpu_and_their_gradients_are_those_of_the_plain_formula(product, shape):
    for batch in [(5,), (2, 3), ()]:
        x, kernel, _ = inputs(shape, batch)
        derivatives = jax.jit(jax.value_and_grad(functools.partial(objective, product), (0, 1)))
        expected = jax.value_and_grad(functools.partial(objective, jnp.matmul), (0, 1))
        assert_close(derivatives(x, kernel), expected(x, kernel))
    several = tuple(jnp.stack([leaf, 2 * leaf]) for leaf in inputs(shape)[:2])
    assert_close(jax.vmap(derivatives)(*several), jax.vmap(expected)(*several))


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_forward_derivatives_and_products_with_the_hessian_are_too(shape):
    arguments = inputs(shape)
    directions = jax.tree.map(jnp.cos, arguments)

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(function, arguments, directions):
        gradient = jax.grad(functools.partial(objective, function), (0, 1, 2))
        forward_over_reverse = jax.jvp(gradient, arguments, directions)
        reverse_over_reverse = jax.vjp(gradient, *arguments)[1](directions)
        return jax.jvp(function, arguments, directions), forward_over_reverse, reverse_over_reverse

    ours, expected = both("tanh")
    assert_close(derivatives(ours, arguments, directions), derivatives(expected, arguments, directions), 5e-6)


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_batch_axes_are_kept(batch):
    for shape in SHAPES[:3]:
        arguments = inputs(shape, batch)
        ours, expected = (f(*arguments) for f in both("tanh"))
        assert ours.shape == (*batch, shape[1])
        assert_close(ours, expected)


@pytest.mark.parametrize("activation", products.SLOPES)
def test_slopes_are_the_derivatives_of_activations(activation):
    function = getattr(jax.nn, activation)
    x = jnp.linspace(-3.0, 3.0, 14)
    np.testing.assert_allclose(products.SLOPES[activation](function(x)), jax.vmap(jax.grad(function))(x), atol=2e-6)


@pytest.mark.parametrize("form", ["plain", "reverse", "few_passes"])
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_bfloat16_rounds_products_and_activations_and_nothing_else(shape, form):
    x, kernel, bias = inputs(shape)
    bfloat16 = jnp.bfloat16
    layer = layers.Dense(shape[1], activation="tanh", dtype=bfloat16, out_dtype=bfloat16, form=form)

    def apply(kernel, bias):
        return layer.apply({"params": {"kernel": kernel, "bias": bias}}, x)

    rounded = [leaf.astype(bfloat16).astype(jnp.float32) for leaf in (x, kernel)]
    outputs = apply(kernel, bias)
    assert outputs.dtype == bfloat16
    # Products of rounded inputs are exact in float32, and so is their sum to its own rounding: half a unit of bfloat16.
    expected = plain(*rounded, bias, "tanh")
    if form == "few_passes" and shape[0] <= products.FEW:
        expected = plain(*rounded, bias.astype(bfloat16).astype(jnp.float32), "tanh")
    np.testing.assert_allclose(outputs.astype(jnp.float32), expected, rtol=2**-8)
    total = lambda *weights: jnp.sum(apply(*weights).astype(jnp.float32))  # noqa: E731
    gradients = jax.grad(total, (0, 1))(kernel, bias)
    exact = jax.grad(lambda *weights: jnp.sum(plain(x, *weights, "tanh")), (0, 1))(kernel, bias)
    for gradient, reference in zip(gradients, exact, strict=True):
        assert gradient.dtype == jnp.float32
        np.testing.assert_allclose(gradient, reference, atol=0.03 * np.abs(reference).max())
