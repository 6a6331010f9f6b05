"""How weights start."""

import jax
import numpy as np
import pytest

from purejaxppo.agent import layers


@pytest.mark.parametrize("scale", [1.0, 2**0.5, 0.01])
@pytest.mark.parametrize("shape", [(4, 64), (64, 64), (64, 2), (400, 64), (1, 16), (64, 1)])
def test_orthogonal_matrices_are_orthogonal(shape, scale):
    matrix = np.asarray(layers.orthogonal(scale)(jax.random.key(0), shape), np.float64)
    assert matrix.shape == shape
    gram = matrix @ matrix.T if shape[0] <= shape[1] else matrix.T @ matrix
    np.testing.assert_allclose(gram / scale**2, np.eye(min(shape)), atol=1e-5)


def test_orthogonal_matrices_are_spread_over_both_determinants_and_all_entries():
    keys = jax.random.split(jax.random.key(0), 400)
    matrices = np.asarray(jax.jit(jax.vmap(lambda key: layers.orthogonal(1.0)(key, (3, 3))))(keys), np.float64)
    determinants = np.linalg.det(matrices)
    np.testing.assert_allclose(np.abs(determinants), 1.0, atol=1e-5)
    # 400 fair coins: standard deviation 10.
    assert 150 < (determinants > 0).sum() < 250
    assert ((matrices > 0).sum(0) > 150).all()
    assert ((matrices > 0).sum(0) < 250).all()
    # Uniform over the rotations: every entry has mean 0 and second moment 1/3 (standard error about 0.015).
    np.testing.assert_allclose(matrices.mean(0), 0.0, atol=0.12)
    np.testing.assert_allclose((matrices**2).mean(0), 1 / 3, atol=0.07)


def test_the_initialiser_gives_a_run_in_a_batch_what_it_gives_alone():
    keys = jax.random.split(jax.random.key(0), 5)
    init = lambda key: layers.orthogonal(1.0)(key, (8, 16))  # noqa: E731
    together = jax.jit(jax.vmap(init))(keys)
    alone = jax.jit(init)
    for i in range(5):
        np.testing.assert_allclose(together[i], alone(keys[i]), atol=1e-6)
    assert not np.allclose(together[0], together[1], atol=0.1)
