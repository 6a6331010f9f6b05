"""What several tests share: small settings, and comparisons of trees."""

import dataclasses
import functools
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np

import purejaxppo as ppo

TINY = ppo.Config(
    env="CartPole-v1",
    total_timesteps=5 * 2 * 8,
    num_envs=2,
    num_steps=8,
    num_epochs=2,
    num_minibatches=2,
    hidden_sizes=(8,),
)


def tiny(**changes) -> ppo.Config:
    """A run of five updates of sixteen samples, unless told otherwise."""
    return dataclasses.replace(TINY, **changes)


@functools.cache
def compiled_train(config: ppo.Config):
    """`train` of this config, compiled once for all tests: (hparams, key) -> (state, metrics)."""
    return jax.jit(functools.partial(ppo.train, config))


def floats(hparams: ppo.HParams) -> ppo.HParams:
    """The same numbers as arrays, so that another value is not another program."""
    return ppo.HParams(*(np.float32(value) for value in hparams))


def leaves(tree) -> list[np.ndarray]:
    """The leaves as NumPy arrays, typed keys as their data."""
    return [
        np.asarray(jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
        for leaf in map(jax.numpy.asarray, jax.tree.leaves(tree))
    ]


def assert_equal(actual, expected) -> None:
    """Every leaf is equal bitwise (NaN equals NaN)."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(leaves(actual), leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def assert_close(actual, expected, rtol=1e-4, atol=1e-5) -> None:
    """Every leaf is equal to rounding."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(leaves(actual), leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def differs(a, b) -> bool:
    """Whether any leaf differs in any bit."""
    pairs = zip(leaves(a), leaves(b), strict=True)
    return any(x.shape != y.shape or not np.array_equal(x, y, equal_nan=x.dtype.kind == "f") for x, y in pairs)


def run_python(code: str, timeout: float, **environment: str) -> str:
    """What the code prints in a fresh interpreter; fails after `timeout` seconds."""
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    env["PYTHONPATH"] = str(pathlib.Path(ppo.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
