"""Our own tanh beside NumPy's in double precision."""

import jax
import jax.numpy as jnp
import numpy as np

from purejaxppo import ops


def floats(least, greatest, stride):
    """Every `stride`-th float32 between the two."""
    first, last = (np.float32(x).view(np.int32) for x in (least, greatest))
    return np.arange(first, last, stride, dtype=np.int32).view(np.float32)


def units_off(function, x):
    """How many units in the last place of the true tanh a function is off."""
    exact = np.tanh(x.astype(np.float64))
    unit = np.spacing(np.minimum(exact, 1 - 2.0**-24).astype(np.float32))
    return np.abs(np.asarray(jax.jit(function)(x), np.float64) - exact) / unit


def test_hand_computed():
    np.testing.assert_allclose(ops.tanh(jnp.log(jnp.array([1.0, 2.0, 3.0]))), [0.0, 0.6, 0.8], rtol=3e-7)
    np.testing.assert_array_equal(ops.tanh(jnp.array([0.0, 1e-30, -1e-6])), np.float32([0.0, 1e-30, -1e-6]))
    assert np.isnan(ops.tanh(jnp.nan))


def test_as_accurate_as_that_of_xla():
    x = floats(2.0**-20, 20.0, 61)
    ours, theirs = units_off(ops.tanh, x), units_off(jnp.tanh, x)
    assert ours.max() < 6.1
    assert ours.mean() < theirs.mean()


def test_odd_and_never_beyond_one():
    x = np.append(floats(2.0**-20, 1e30, 1009), np.float32(np.inf))
    values = np.asarray(jax.jit(ops.tanh)(x))
    np.testing.assert_array_equal(jax.jit(ops.tanh)(-x), -values)
    assert values.max() <= 1
    assert values[-1] > 1 - 4e-7


def test_derivatives_are_those_of_tanh():
    x = jnp.linspace(-6, 6, 101)
    exact = np.tanh(np.asarray(x, np.float64))
    slope = 1 - exact**2
    derivatives = jax.grad(ops.tanh), jax.jacfwd(ops.tanh), jax.hessian(ops.tanh)
    for derivative, expected in zip(derivatives, (slope, slope, -2 * exact * slope), strict=True):
        np.testing.assert_allclose(jax.vmap(derivative)(x), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ops.tanh_slope(jnp.float32(0.8)), 0.36, rtol=1e-6)


def test_no_slope_far_out():
    """Where it has saturated it teaches nothing, and nothing false."""
    far = jnp.array([-1e30, -20.0, 20.0, 1e30])
    np.testing.assert_allclose(jax.vmap(jax.grad(ops.tanh))(far), 0.0, atol=1e-6)
