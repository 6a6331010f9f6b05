"""How weights start."""

import jax
import jax.numpy as jnp
import numpy as np

import purejaxppo as ppo
from purejaxppo.agent import envs, layers, networks


def test_orthonormal_matrices_are_orthonormal_and_independent_in_any_order_of_shapes():
    shapes = [(4, 64), (64, 64), (64, 2), (400, 64), (1, 16), (64, 4), (64, 1), (64, 64), (4, 64)]
    matrices = [np.asarray(matrix, np.float64) for matrix in layers.orthonormal(jax.random.key(0), shapes)]
    assert [matrix.shape for matrix in matrices] == shapes
    for matrix in matrices:
        gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
        np.testing.assert_allclose(gram, np.eye(len(gram)), atol=1e-5)
    for i, j in [(0, 8), (1, 7), (0, 5)]:
        correlation = np.corrcoef(matrices[i].reshape(-1), matrices[j].reshape(shapes[i]).reshape(-1))[0, 1]
        assert abs(correlation) < 4 / matrices[i].size ** 0.5


def test_every_matrix_of_a_network_is_an_orthonormal_one_times_its_scale():
    config = ppo.Config(env="Pendulum-v1", hidden_sizes=(8, 16), network="gru")
    network = networks.make(config, envs.make(config.env))
    params = networks.init(network, jax.random.key(0), jnp.zeros((1, 3)), -1.5)["params"]
    assert (params["actor_log_std"] == -1.5).all()
    scales = {"actor_head": 0.01, "critic_head": 1.0, "Dense_0": 2**0.5, "GRUCell_0": 1.0}
    found = set()
    for path, leaf in jax.tree.leaves_with_path(params):
        if leaf.ndim == 2:
            name = next(key.key for key in path if key.key in scales)
            gram = leaf @ leaf.T if leaf.shape[0] <= leaf.shape[1] else leaf.T @ leaf
            np.testing.assert_allclose(gram / scales[name] ** 2, np.eye(len(gram)), atol=1e-5)
            found.add(name)
        elif path[-1].key == "bias":
            assert not leaf.any()
    assert found == set(scales)


def test_orthogonal_matrices_are_spread_over_both_determinants_and_all_entries():
    keys = jax.random.split(jax.random.key(0), 400)
    matrices = np.asarray(jax.jit(jax.vmap(lambda key: layers.orthonormal(key, [(3, 3)])[0]))(keys), np.float64)
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
    init = lambda key: layers.orthonormal(key, [(8, 16)])[0]  # noqa: E731
    together = jax.jit(jax.vmap(init))(keys)
    alone = jax.jit(init)
    for i in range(5):
        np.testing.assert_allclose(together[i], alone(keys[i]), atol=1e-6)
    assert not np.allclose(together[0], together[1], atol=0.1)
