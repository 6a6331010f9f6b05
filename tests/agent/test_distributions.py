"""Each kind of distribution against scipy and NumPy, the bounds of its actions, and the samples that it draws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.stats

import purejaxppo as ppo
from purejaxppo.agent import distributions, envs, networks
from purejaxppo.agent import ppo as agent_ppo
from tests.helpers import tiny

CATEGORICAL, THREE = distributions.Categorical(4), distributions.Categorical(3)
BOUNDS = ((-1.0, 0.0), (1.0, 4.0))
NORMAL, RESCALED = distributions.Normal(*BOUNDS), distributions.Normal(*BOUNDS, rescale=True)
SQUASHED = distributions.TanhNormal(*BOUNDS)
MEAN, STD = np.array([0.3, -1.2]), np.array([0.5, 2.0])
PARAMS = jnp.array([*MEAN, *np.log(STD)], jnp.float32)

# Categorical


def test_samples_are_categorical():
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    noise = CATEGORICAL.draw_noise(jax.random.key(0), (20_000,))
    actions = CATEGORICAL.sample(jnp.broadcast_to(jnp.log(probabilities), (20_000, 4)), noise)
    assert (actions.dtype, actions.shape) == (jnp.int32, (20_000,))
    counts = np.bincount(np.asarray(actions), minlength=4)
    chi_square = ((counts - 20_000 * probabilities) ** 2 / (20_000 * probabilities)).sum()
    assert chi_square < 16.3  # 3 degrees of freedom: p = 0.001


def test_samples_do_not_depend_on_a_shift_of_the_logits():
    noise = THREE.draw_noise(jax.random.key(0), (1000,))
    logits = jnp.array([0.5, -0.5, 0.0])
    np.testing.assert_array_equal(THREE.sample(logits, noise), THREE.sample(logits + 4.0, noise))


def test_the_log_probability_and_entropy_of_a_choice_are_those_of_its_probabilities():
    probabilities = np.array([[0.5, 0.3, 0.2], [0.01, 0.01, 0.98]])
    policy = THREE.distribution(jnp.log(probabilities) + jnp.array([[3.0], [-200.0]]))
    for action in range(3):
        expected = np.log(probabilities[:, action])
        np.testing.assert_allclose(policy.log_prob(jnp.array([action, action])), expected, rtol=1e-4)
    np.testing.assert_allclose(policy.entropy(), scipy.stats.entropy(probabilities, axis=1), rtol=1e-4)


@pytest.mark.parametrize("impossible", [-np.inf, -1e9])
def test_what_is_never_chosen_leaves_finite_values_and_gradients(impossible):
    logits = jnp.array([0.0, impossible, np.log(3.0)])
    policy = THREE.distribution(logits)
    np.testing.assert_allclose(policy.log_prob(jnp.array(2)), np.log(0.75), rtol=1e-6)
    np.testing.assert_allclose(policy.entropy(), scipy.stats.entropy([0.25, 0.75]), rtol=1e-6)
    assert policy.log_prob(jnp.array(1)) <= -1e9
    of_log_prob = jax.grad(lambda logits: THREE.distribution(logits).log_prob(jnp.array(2)))(logits)
    np.testing.assert_allclose(of_log_prob, [-0.25, 0.0, 0.25], atol=1e-6)
    # dH / dlogit_a = -p_a (log p_a + H)
    entropy = scipy.stats.entropy([0.25, 0.75])
    expected = [-0.25 * (np.log(0.25) + entropy), 0.0, -0.75 * (np.log(0.75) + entropy)]
    np.testing.assert_allclose(jax.grad(lambda x: THREE.distribution(x).entropy())(logits), expected, atol=1e-6)


def test_zero_noise_gives_the_mode():
    logits = jnp.array([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0], [-3.0, -2.0, -1.0]])
    np.testing.assert_array_equal(THREE.sample(logits, jnp.zeros((3, 3))), [1, 0, 2])


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
@pytest.mark.parametrize("logits", [[np.nan] * 3, [0.0, np.nan, 0.0], [np.inf, -np.inf, 0.0], [np.inf] * 3])
def test_invalid_logits_give_a_valid_action(logits, transform):
    noise = THREE.draw_noise(jax.random.key(0), (50,))
    actions = np.asarray(transform(THREE.sample)(jnp.broadcast_to(jnp.array(logits), (50, 3)), noise))
    assert ((actions >= 0) & (actions < 3)).all()


def test_noise_is_standard_gumbel():
    noise = np.asarray(THREE.draw_noise(jax.random.key(0), (30_000,)), np.float64)
    assert np.isfinite(noise).all()
    np.testing.assert_allclose(noise.mean(), np.euler_gamma, atol=0.02)
    np.testing.assert_allclose(noise.var(), np.pi**2 / 6, rtol=0.03)


# Several choices at once

MULTI = distributions.MultiCategorical((2, 3))
LOGITS = jnp.log(jnp.array([0.3, 0.7, 0.2, 0.5, 0.3])) + jnp.array([4.0, 4.0, -1.0, -1.0, -1.0])


def test_choices_at_once_are_independent():
    """Every pair of choices has the product of its probabilities."""
    actions = MULTI.sample(LOGITS, MULTI.draw_noise(jax.random.key(0), (30_000,)))
    assert (actions.dtype, actions.shape) == (jnp.int32, (30_000, 2))
    expected = np.outer([0.3, 0.7], [0.2, 0.5, 0.3]) * 30_000
    counts = np.histogram2d(*np.asarray(actions).T, bins=[2, 3], range=[[0, 2], [0, 3]])[0]
    assert ((counts - expected) ** 2 / expected).sum() < 20.5  # 5 degrees of freedom: p = 0.001
    np.testing.assert_array_equal(MULTI.sample(LOGITS, jnp.zeros(5)), [1, 1])


def test_choices_at_once_add_their_log_probabilities_entropies_and_kls():
    policy = MULTI.distribution(LOGITS)
    np.testing.assert_allclose(policy.log_prob(jnp.array([0, 2])), np.log(0.3 * 0.3), rtol=1e-5)
    expected = scipy.stats.entropy([0.3, 0.7]) + scipy.stats.entropy([0.2, 0.5, 0.3])
    np.testing.assert_allclose(policy.entropy(), expected, rtol=1e-5)
    kl = scipy.stats.entropy([0.3, 0.7], [0.5, 0.5]) + scipy.stats.entropy([0.2, 0.5, 0.3], np.ones(3) / 3)
    np.testing.assert_allclose(MULTI.kl(LOGITS, jnp.zeros(5)), kl, rtol=1e-5)


# Normal


@pytest.mark.parametrize("kind", [NORMAL, RESCALED, SQUASHED])
def test_normal_samples_are_normal_and_zero_noise_gives_the_mean(kind):
    noise = kind.draw_noise(jax.random.key(0), (50_000,))
    actions = np.asarray(kind.sample(PARAMS, noise), np.float64)
    assert actions.shape == (50_000, 2)
    np.testing.assert_allclose(actions.mean(0), MEAN, atol=0.04)
    np.testing.assert_allclose(actions.std(0), STD, rtol=0.02)
    np.testing.assert_allclose(np.corrcoef(actions.T)[0, 1], 0.0, atol=0.02)
    standard = (actions - MEAN) / STD
    assert max(scipy.stats.kstest(standard[:, d], "norm").statistic for d in (0, 1)) < 0.01
    np.testing.assert_allclose(kind.sample(PARAMS, jnp.zeros(2)), MEAN, rtol=1e-6)


def test_the_log_probability_and_entropy_of_a_normal_are_those_of_scipy():
    reference = scipy.stats.multivariate_normal(MEAN, np.diag(STD**2))
    actions = np.random.default_rng(0).normal(size=(20, 2)) * 3
    policy = NORMAL.distribution(jnp.broadcast_to(PARAMS, (20, 4)))
    np.testing.assert_allclose(policy.log_prob(jnp.asarray(actions, jnp.float32)), reference.logpdf(actions), rtol=1e-4)
    np.testing.assert_allclose(policy.entropy(), np.full(20, reference.entropy()), rtol=1e-5)


def numerical_kl(old, new):
    """KL of two normals [..., (mean, std)] of one dimension by integration."""
    integrand = lambda x: old.pdf(x) * (old.logpdf(x) - new.logpdf(x))  # noqa: E731
    return scipy.integrate.quad(integrand, old.mean() - 9 * old.std(), old.mean() + 9 * old.std(), limit=200)[0]


@pytest.mark.parametrize("kind", [NORMAL, SQUASHED])
def test_the_kl_is_that_of_the_integral(kind):
    """An invertible map such as the tanh leaves it as it is."""
    other_mean, other_std = np.array([0.0, -1.0]), np.array([0.7, 1.5])
    pairs = zip(MEAN, STD, other_mean, other_std, strict=True)
    expected = sum(numerical_kl(scipy.stats.norm(m, s), scipy.stats.norm(om, os)) for m, s, om, os in pairs)
    other = jnp.array([*other_mean, *np.log(other_std)], jnp.float32)
    np.testing.assert_allclose(kind.kl(PARAMS, other), expected, rtol=1e-5)
    assert kind.kl(PARAMS, PARAMS) == 0.0


# Squashed


def numpy_log_slope(u):
    """log(1 - tanh(u)^2) = -2 log cosh(u), in float64 and by logaddexp, which neither overflows nor rounds to 0."""
    return -2 * (np.logaddexp(u, -u) - np.log(2))


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0, 20.0, 300.0])
def test_the_log_probability_of_a_squashed_action_is_the_change_of_variables(scale):
    pre_tanh = np.array([[1.0, -1.0], [-0.5, 1.0], [1.0, 1.0]]) * scale
    expected = (scipy.stats.norm(MEAN, STD).logpdf(pre_tanh) - numpy_log_slope(pre_tanh)).sum(-1)
    log_prob = lambda u: SQUASHED.distribution(jnp.broadcast_to(PARAMS, (3, 4))).log_prob(u)  # noqa: E731
    np.testing.assert_allclose(log_prob(jnp.asarray(pre_tanh, jnp.float32)), expected, rtol=1e-4, atol=1e-4)
    gradient = jax.grad(lambda u: log_prob(u).sum())(jnp.asarray(pre_tanh, jnp.float32))
    np.testing.assert_allclose(gradient, (MEAN - pre_tanh) / STD**2 + 2 * np.tanh(pre_tanh), rtol=1e-4, atol=1e-4)


def test_the_density_of_a_squashed_action_integrates_to_1():
    """Over (-1, 1), the units of the tanh: with du = dy / (1 - y^2)."""
    kind, params = distributions.TanhNormal((-1.0,), (1.0,)), jnp.array([0.3, np.log(0.8)], jnp.float32)
    y = np.tanh(np.linspace(-6, 6, 20_001))
    density = np.exp(kind.distribution(params).log_prob(jnp.asarray(np.arctanh(y), jnp.float32)[:, None]))
    np.testing.assert_allclose(scipy.integrate.trapezoid(density, y), 1.0, atol=1e-4)


@pytest.mark.parametrize(("std", "tolerance"), [(0.1, 1e-4), (0.5, 1e-4), (1.0, 1e-4), (2.0, 4e-3), (3.0, 0.03)])
@pytest.mark.parametrize("mean", [0.0, 1.0, -3.0])
def test_the_entropy_of_a_squashed_action_is_that_of_the_integral(mean, std, tolerance):
    normal = scipy.stats.norm(mean, std)
    integrand = lambda u: normal.pdf(u) * (normal.logpdf(u) - numpy_log_slope(u))  # noqa: E731
    expected = -scipy.integrate.quad(integrand, mean - 10 * std, mean + 10 * std, limit=400)[0]
    kind = distributions.TanhNormal((-1.0,), (1.0,))
    entropy = kind.distribution(jnp.array([mean, np.log(std)], jnp.float32)).entropy()
    np.testing.assert_allclose(entropy, expected, atol=tolerance)


# Bounds


def test_actions_are_clipped_to_each_bound_for_the_environment_alone():
    actions = jnp.array([[-9.0, -9.0], [0.5, 3.0], [9.0, 9.0]])
    np.testing.assert_array_equal(NORMAL.to_env(actions), [[-1, 0], [0.5, 3], [1, 4]])


def test_rescaled_actions_reach_each_bound_at_1():
    actions = jnp.array([[-9.0, -1.0], [0.0, 0.0], [0.5, -0.5], [1.0, 9.0]])
    np.testing.assert_allclose(RESCALED.to_env(actions), [[-1, 0], [0, 2], [0.5, 1], [1, 4]])


def test_squashed_actions_lie_within_the_bounds_and_reach_them():
    actions = np.asarray(SQUASHED.to_env(jnp.array([[-50.0, -50.0], [0.0, 0.0], [np.arctanh(0.5), 50.0]])))
    np.testing.assert_allclose(actions, [[-1, 0], [0, 2], [0.5, 4]], rtol=1e-6)
    assert (actions >= BOUNDS[0]).all()
    assert (actions <= BOUNDS[1]).all()


@pytest.mark.parametrize("field", ["squash", "rescale_actions"])
@pytest.mark.parametrize(("env", "what"), [("CartPole-v1", "discrete"), ("UnboundedActions-test", "unbounded")])
def test_mapping_onto_bounds_that_are_not_there_is_refused(field, env, what):
    config = tiny(env=env, **{field: True})
    with pytest.raises(ValueError, match=rf"^config\.{field} = True: {env} has {what} actions; allowed .*Box"):
        networks.make(config, envs.make(env))


def test_actions_without_bounds_reach_the_environment_as_they_are():
    kind = networks.make(tiny(env="UnboundedActions-test"), envs.make("UnboundedActions-test")).actions
    np.testing.assert_array_equal(kind.to_env(jnp.array([-1e6, 1e6])), [-1e6, 1e6])


# The log standard deviation


@functools.cache
def continuous(squash):
    config = tiny(env="Echo-test", squash=squash)
    network = networks.make(config, envs.make("Echo-test"))
    return config, network, jax.jit(lambda key: ppo.init(config, ppo.HParams(log_std_init=0.0), key))(jax.random.key(0))


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize("log_std", [-20.0, 20.0])
def test_extreme_log_standard_deviations_give_finite_losses_and_gradients(squash, log_std):
    config, network, state = continuous(squash)
    params = {"params": state.params["params"] | {"actor_log_std": jnp.full(2, log_std)}}
    obs = jax.random.normal(jax.random.key(1), (64, 2))
    noise = network.actions.draw_noise(jax.random.key(2), (64,))
    dist_params, action, _ = networks.act(network, params, (), obs, noise)
    batch = ppo.Batch(
        obs=obs,
        action=action,
        dist_params=dist_params,
        log_prob=network.actions.distribution(dist_params).log_prob(action),
        value=jnp.zeros(64),
        advantages=jax.random.normal(jax.random.key(3), (64,)),
        value_targets=jnp.ones(64),
    )
    moved = jax.tree.map(lambda x: x + 1e-3, params)
    for candidate in (params, moved):
        loss = lambda params: agent_ppo.loss(params, config, ppo.HParams(ent_coef=0.1), network, batch)  # noqa: E731
        (total, _), gradient = jax.value_and_grad(loss, has_aux=True)(candidate)
        assert np.isfinite(total)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_the_log_standard_deviation_starts_where_it_is_told_and_is_traced():
    config, network, _ = continuous(False)
    start = lambda log_std: ppo.init(config, ppo.HParams(log_std_init=log_std), jax.random.key(0))  # noqa: E731
    states = jax.jit(jax.vmap(start))(jnp.array([-1.0, 0.5]))
    np.testing.assert_allclose(states.params["params"]["actor_log_std"], [[-1.0, -1.0], [0.5, 0.5]])
    dist_params = networks.policy(network, jax.tree.map(lambda x: x[0], states.params), jnp.zeros((3, 2)))
    np.testing.assert_allclose(dist_params[:, 2:], -1.0)
    np.testing.assert_allclose(dist_params[:, :2], 0.0, atol=0.1)


def test_a_log_standard_deviation_of_discrete_actions_is_refused():
    with pytest.raises(ValueError, match=r"^hparams\.log_std_init = -1: is read only with continuous.*CartPole"):
        ppo.init(tiny(), ppo.HParams(log_std_init=-1.0), jax.random.key(0))
