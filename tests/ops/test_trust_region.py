"""Steps in behaviour against dense matrices, the one-parameter policy worked out by hand, and made-up line searches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from purejaxppo import ops
from tests.helpers import assert_close

NAN, INF = float("nan"), float("inf")


def bits(tree):
    """The leaves bit by bit, so that -0.0 is not 0.0."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# Two small policies, and their Fisher matrices from the scores of single actions

OBS = normal(0, 6, 2)
SOFTMAX = {"hidden": {"w": normal(1, 2, 3), "b": normal(2, 3)}, "head": normal(3, 3, 4)}
GAUSSIAN = {"hidden": {"w": normal(4, 2, 3), "b": normal(5, 3)}, "head": normal(6, 3, 2), "log_std": normal(7, 2)}


def head(params, obs):
    return jnp.tanh(obs @ params["hidden"]["w"] + params["hidden"]["b"]) @ params["head"]


def softmax_kl(params):
    return jnp.mean(ops.kl_categorical(head(SOFTMAX, OBS), head(params, OBS)))


def gaussian_kl(params):
    std = lambda params: jnp.broadcast_to(params["log_std"], (len(OBS), 2))  # noqa: E731
    return jnp.mean(ops.kl_normal(head(GAUSSIAN, OBS), std(GAUSSIAN), head(params, OBS), std(params)))


def fisher(log_prob, params, samples):
    """E[score score'] over weighted (observation, action) pairs, each score differentiated by itself."""
    flat, unravel = ravel_pytree(params)
    score = jax.jit(jax.grad(lambda flat, obs, action: log_prob(unravel(flat), obs, action)))
    scores = [np.asarray(score(flat, obs, action), np.float64) for _, obs, action in samples]
    return sum(weight * np.outer(s, s) for (weight, _, _), s in zip(samples, scores, strict=True))


def softmax_fisher():
    def log_prob(params, obs, action):
        return jax.nn.log_softmax(head(params, obs))[action]

    probs = np.asarray(jax.nn.softmax(head(SOFTMAX, OBS)))
    samples = [(probs[i, a] / len(OBS), OBS[i], a) for i in range(len(OBS)) for a in range(4)]
    return fisher(log_prob, SOFTMAX, samples)


def gaussian_fisher():
    """The expectation over actions by Gauss-Hermite quadrature, exact for these scores: they are quadratic."""

    def log_prob(params, obs, action):
        return jax.scipy.stats.norm.logpdf(action, head(params, obs), jnp.exp(params["log_std"])).sum()

    nodes, weights = np.polynomial.hermite_e.hermegauss(4)
    weights = weights / weights.sum()
    mean, std = np.asarray(head(GAUSSIAN, OBS)), np.exp(GAUSSIAN["log_std"])
    samples = [
        (weights[j] * weights[k] / len(OBS), OBS[i], jnp.asarray(mean[i] + std * np.array([nodes[j], nodes[k]])))
        for i in range(len(OBS))
        for j in range(4)
        for k in range(4)
    ]
    return fisher(log_prob, GAUSSIAN, samples)


POLICIES = {"softmax": (softmax_kl, SOFTMAX, softmax_fisher), "Gaussian": (gaussian_kl, GAUSSIAN, gaussian_fisher)}


@pytest.mark.parametrize("name", POLICIES)
def test_the_product_is_that_of_the_matrix_of_scores(name):
    mean_kl, params, dense = POLICIES[name]
    matrix = dense()
    flat, unravel = ravel_pytree(params)
    product = jax.jit(lambda vector: ops.fisher_vector_product(mean_kl, params, vector))
    for seed in range(5):
        vector = normal(seed, len(flat))
        actual = ravel_pytree(product(unravel(vector)))[0]
        np.testing.assert_allclose(actual, matrix @ vector, rtol=1e-4, atol=1e-5 * np.abs(matrix).max())
    assert np.linalg.norm(matrix @ vector) > 0.1


@pytest.mark.parametrize("damping", [0.1, 3.0])
def test_damping_adds_that_much_of_the_vector(damping):
    vector = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape), SOFTMAX)
    plain = ops.fisher_vector_product(softmax_kl, SOFTMAX, vector)
    damped = ops.fisher_vector_product(softmax_kl, SOFTMAX, vector, damping)
    assert_close(damped, jax.tree.map(lambda p, v: p + damping * v, plain, vector), rtol=1e-5, atol=1e-6)


def test_products_of_a_batch_are_those_of_each_alone():
    vectors = jax.tree.map(lambda x: jnp.stack([x, 2 * x, x**2]), SOFTMAX)
    dampings = jnp.array([0.0, 0.1, 1.0])
    product = lambda vector, damping: ops.fisher_vector_product(softmax_kl, SOFTMAX, vector, damping)  # noqa: E731
    together = jax.vmap(product)(vectors, dampings)
    for lane in range(3):
        alone = product(jax.tree.map(lambda x, i=lane: x[i], vectors), dampings[lane])
        assert_close(jax.tree.map(lambda x, i=lane: x[i], together), alone, rtol=1e-5, atol=1e-6)


# Conjugate gradient

TARGET = {"a": normal(10, 2, 3), "b": (normal(11, 4),)}
NUM = 10


def positive_definite(seed):
    factor = np.random.default_rng(seed).normal(size=(NUM, NUM))
    return factor @ factor.T / NUM + 0.5 * np.eye(NUM)


def solve(matrix, target, num_iters):
    unravel = ravel_pytree(target)[1]
    matrix = jnp.asarray(matrix, jnp.float32)
    return ops.conjugate_gradient(lambda v: unravel(matrix @ ravel_pytree(v)[0]), target, num_iters)


@pytest.mark.parametrize("seed", range(5))
def test_as_many_iterations_as_dimensions_solve_the_system(seed):
    matrix = positive_definite(seed)
    x = solve(matrix, TARGET, NUM)
    assert jax.tree.structure(x) == jax.tree.structure(TARGET)
    exact = np.linalg.solve(matrix, np.asarray(ravel_pytree(TARGET)[0], np.float64))
    np.testing.assert_allclose(ravel_pytree(x)[0], exact, rtol=1e-3, atol=1e-4)


def test_two_distinct_eigenvalues_take_two_iterations():
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(NUM, NUM)))[0]
    matrix = basis @ np.diag([1.0] * 4 + [5.0] * 6) @ basis.T
    exact = np.linalg.solve(matrix, np.asarray(ravel_pytree(TARGET)[0], np.float64))
    np.testing.assert_allclose(ravel_pytree(solve(matrix, TARGET, 2))[0], exact, rtol=1e-3, atol=1e-4)
    assert np.abs(ravel_pytree(solve(matrix, TARGET, 1))[0] - exact).max() > 1e-2


def test_every_iteration_descends_the_quadratic():
    matrix, target = positive_definite(0), np.asarray(ravel_pytree(TARGET)[0], np.float64)
    values = [0.0]
    for num_iters in range(1, 7):
        x = np.asarray(ravel_pytree(solve(matrix, TARGET, num_iters))[0], np.float64)
        values.append(0.5 * x @ matrix @ x - target @ x)
    assert (np.diff(values) < 0).all(), values


@pytest.mark.parametrize("num_iters", [1, 10])
def test_a_zero_target_gives_exactly_zero(num_iters):
    x = solve(positive_definite(0), jax.tree.map(np.zeros_like, TARGET), num_iters)
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(x))


@pytest.mark.parametrize("matrix", [np.zeros((NUM, NUM)), -np.eye(NUM)])
def test_without_curvature_the_answer_is_zero_and_not_nan(matrix):
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(solve(matrix, TARGET, 5)))


def test_iterations_after_the_solution_leave_it_alone():
    exact = np.asarray(ravel_pytree(TARGET)[0]) / 2
    for num_iters in (1, 50):
        x = ravel_pytree(solve(2 * np.eye(NUM), TARGET, num_iters))[0]
        np.testing.assert_allclose(x, exact, rtol=1e-6)


def test_tiny_and_huge_targets_are_solved_as_well():
    matrix = positive_definite(1)
    unit = ravel_pytree(solve(matrix, TARGET, NUM))[0]
    for scale in (1e-12, 1e12):
        scaled = jax.tree.map(lambda x, s=scale: x * np.float32(s), TARGET)
        np.testing.assert_allclose(ravel_pytree(solve(matrix, scaled, NUM))[0] / scale, unit, rtol=1e-2, atol=1e-3)


# The natural step, on pi(right) = sigmoid(theta)


def sigmoid_kl(old_theta):
    logits = lambda theta: jnp.stack([jnp.zeros(()), theta])  # noqa: E731
    return lambda theta: ops.kl_categorical(jax.lax.stop_gradient(logits(old_theta)), logits(theta))


def sigmoid_step(theta, max_kl=0.01):
    """The natural step towards more reward, which is pi(right)."""
    theta = jnp.asarray(theta, jnp.float32)
    product = lambda vector: ops.fisher_vector_product(sigmoid_kl(theta), theta, vector)  # noqa: E731
    direction = ops.conjugate_gradient(product, jax.grad(jax.nn.sigmoid)(theta), 5)
    return ops.natural_step(direction, product, max_kl)


@pytest.mark.parametrize(
    ("theta", "kl", "curvature", "quadratic"), [(0.0, 0.120, 0.25, 0.125), (4.0, 0.0066, 0.0177, 0.0088)]
)
def test_the_kl_of_a_step_of_1_and_its_quadratic_model(theta, kl, curvature, quadratic):
    theta = jnp.asarray(theta)
    np.testing.assert_allclose(sigmoid_kl(theta)(theta + 1), kl, rtol=0, atol=5e-4 if kl > 0.01 else 5e-5)
    product = ops.fisher_vector_product(sigmoid_kl(theta), theta, jnp.ones(()))
    np.testing.assert_allclose(product, curvature, atol=5e-5)
    np.testing.assert_allclose(product / 2, quadratic, atol=5e-5)


@pytest.mark.parametrize(
    ("theta", "step", "kl", "gradient"),
    [(0.0, 0.283, 0.0100, 0.250), (2.0, 0.436, 0.0090, 0.105), (4.0, 1.064, 0.0073, 0.018)],
)
def test_the_natural_step_grows_where_the_gradient_vanishes(theta, step, kl, gradient):
    theta = jnp.asarray(theta)
    np.testing.assert_allclose(jax.grad(jax.nn.sigmoid)(theta), gradient, atol=5e-4)
    np.testing.assert_allclose(sigmoid_step(theta), step, atol=5e-4)
    np.testing.assert_allclose(sigmoid_kl(theta)(theta + sigmoid_step(theta)), kl, atol=5e-5)


def test_eleven_natural_steps_do_what_takes_107_plain_ones():
    def steps(move):
        move = jax.jit(move)
        theta, count = jnp.zeros(()), 0
        while jax.nn.sigmoid(theta) < 0.99:
            theta, count = theta + move(theta), count + 1
        return count

    assert steps(sigmoid_step) == 11
    assert steps(jax.grad(jax.nn.sigmoid)) == 107


def test_the_step_is_as_long_as_the_quadratic_model_allows_whatever_the_length_of_the_direction():
    product = lambda vector: ops.fisher_vector_product(softmax_kl, SOFTMAX, vector, 0.1)  # noqa: E731
    step = ops.natural_step(SOFTMAX, product, 0.03)
    np.testing.assert_allclose(0.5 * jnp.vdot(*(ravel_pytree(x)[0] for x in (step, product(step)))), 0.03, rtol=1e-4)
    longer = jax.tree.map(lambda x: 7 * x, SOFTMAX)
    assert_close(ops.natural_step(longer, product, 0.03), step, rtol=1e-4, atol=1e-6)
    assert (ravel_pytree(step)[0] * ravel_pytree(SOFTMAX)[0] >= 0).all()  # and not backwards


@pytest.mark.parametrize("value", [0.0, NAN, INF, 1e30])
def test_a_direction_without_a_finite_step_gives_exactly_none(value):
    direction = {"a": jnp.array([value, 1.0 if value else 0.0]), "b": jnp.zeros(())}
    step = ops.natural_step(direction, lambda v: v, 0.01)
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(step))


@pytest.mark.parametrize("curvature", [0.0, -1.0, NAN, INF])
def test_a_curvature_without_a_finite_step_gives_exactly_none(curvature):
    step = ops.natural_step(jnp.ones(3), lambda v: curvature * v, 0.01)
    np.testing.assert_array_equal(step, np.zeros(3))


@pytest.mark.parametrize(("curvature", "target"), [(NAN, 1.0), (INF, 1.0), (1.0, NAN), (1.0, INF), (1.0, 1e30)])
def test_what_is_not_finite_on_the_way_gives_exactly_no_step(curvature, target):
    product = lambda v: curvature * v  # noqa: E731
    direction = ops.conjugate_gradient(product, jnp.array([target, 1.0, 0.0]), 10)
    np.testing.assert_array_equal(ops.natural_step(direction, product, 0.01), np.zeros(3))


# The line search, on made-up surrogates and KLs of one number

START = {"x": jnp.zeros(()), "others": jnp.array([-0.0, 1e-40, -3.5, NAN])}
STEP = {"x": jnp.ones(()), "others": jnp.zeros(4)}


def search(surrogate, kl, max_kl=1.0, coef=0.5, num_iters=4, params=START, step=STEP):
    evaluate = lambda params: (surrogate(params["x"]), kl(params["x"]))  # noqa: E731
    return ops.backtracking_line_search(evaluate, params, step, max_kl, coef, num_iters)


def rise(x):
    return x


def square(x):
    return x**2


def nothing(x):
    return jnp.zeros_like(x)


@pytest.mark.parametrize(
    ("surrogate", "kl", "max_kl", "fraction"),
    [
        (rise, square, 1.0, 1.0),  # the bound itself is allowed
        (rise, square, 0.99, 0.5),
        (rise, square, 0.1, 0.25),
        (rise, square, 0.02, 0.125),
        (rise, square, 0.01, 0.0),
        (lambda x: x * (0.6 - x), nothing, 1.0, 0.5),  # the full step is worse than none
        (lambda x: x * (0.2 - x), nothing, 1.0, 0.125),
        (lambda x: x * (0.2 - x), square, 0.001, 0.0),
        (lambda x: jnp.where((x == 0.5) | (x == 0.125), 1.0, 0.0), nothing, 1.0, 0.5),  # the longest, not the last
        (lambda x: jnp.where((x == 1) | (x == 0.25), 1.0, 0.0), square, 0.5, 0.25),  # both at once
        (lambda x: jnp.where(x > 0, 1 / x, 0.0), nothing, 1.0, 1.0),  # the longest, not the best
        (nothing, nothing, 1.0, 0.0),  # as good as before is not better
        (lambda x: -x, nothing, 1.0, 0.0),
        (lambda x: jnp.where(x > 0.3, NAN, x), nothing, 1.0, 0.25),
        (lambda x: jnp.where(x > 0.3, INF, x), nothing, 1.0, 0.25),
        (lambda x: jnp.where(x > 0.3, -INF, x), nothing, 1.0, 0.25),
        (rise, lambda x: jnp.where(x > 0.6, NAN, 0.0), 1.0, 0.5),
        (rise, lambda x: jnp.where(x > 0.6, INF, 0.0), 1.0, 0.5),
        (lambda x: jnp.where(x > 0, NAN, 0.0), nothing, 1.0, 0.0),
        (lambda x: jnp.where(x > 0, INF, 0.0), nothing, 1.0, 0.0),
        (lambda x: x + NAN, nothing, 1.0, 0.0),
        (rise, lambda x: jnp.where(x > 0, NAN, 0.0), 1.0, 0.0),
    ],
)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_the_longest_acceptable_fraction_is_taken(surrogate, kl, max_kl, fraction, transform):
    params, accepted = transform(lambda: search(surrogate, kl, max_kl))()
    assert accepted == fraction
    assert params["x"] == fraction
    if fraction == 0:
        assert bits(params) == bits(START)


@pytest.mark.parametrize("value", [NAN, INF, -1.0, 0.0])
def test_a_step_that_is_wrong_or_not_finite_leaves_every_bit(value):
    step = {"x": jnp.full((), value), "others": jnp.full(4, value)}
    params, accepted = search(rise, nothing, step=step)
    assert accepted == 0
    assert bits(params) == bits(START)


@pytest.mark.parametrize(("num_iters", "fraction"), [(1, 0.0), (2, 0.0), (3, 0.25), (30, 0.25)])
def test_only_so_many_candidates_are_considered(num_iters, fraction):
    assert search(rise, square, 0.1, num_iters=num_iters)[1] == fraction


def test_the_factor_between_candidates_is_traced():
    traces = []

    def fraction(coef, max_kl):
        traces.append(1)
        return search(rise, square, max_kl, coef, num_iters=10)[1]

    compiled = jax.jit(fraction)
    for coef, max_kl, power in [(0.5, 0.1, 2), (0.8, 0.1, 6), (0.1, 0.02, 1), (0.9, 2.0, 0)]:
        np.testing.assert_allclose(compiled(jnp.float32(coef), jnp.float32(max_kl)), coef**power, rtol=1e-5)
    assert len(traces) == 1


def test_each_lane_takes_its_own_fraction():
    max_kl = jnp.array([10.0, 0.3, 0.1, 1e-9, NAN])
    step = {"x": jnp.array([1.0, 1.0, -1.0, 1.0, 1.0]), "others": jnp.ones((5, 4))}
    params, accepted = jax.vmap(lambda max_kl, step: search(rise, square, max_kl, step=step))(max_kl, step)
    np.testing.assert_array_equal(accepted, [1.0, 0.5, 0.0, 0.0, 0.0])
    np.testing.assert_array_equal(params["x"], [1.0, 0.5, 0.0, 0.0, 0.0])
    np.testing.assert_array_equal(params["others"][:2, 2], [-2.5, -3.0])
    for lane in (2, 3, 4):
        assert bits(jax.tree.map(lambda x, i=lane: x[i], params)) == bits(START)
