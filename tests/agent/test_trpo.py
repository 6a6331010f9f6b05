"""The natural gradient step and its line search on real rollouts, and that actor and critic leave each other alone."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import purejaxppo as ppo
from purejaxppo import results
from purejaxppo.agent import envs, networks, trpo
from purejaxppo.agent import rollout as agent_rollout
from purejaxppo.host import experiment
from purejaxppo.train import estimate, permutations
from tests.helpers import assert_close, assert_equal, compiled_train, differs, floats, tiny

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
CONFIG = tiny(algorithm="trpo", num_envs=4, num_steps=16, total_timesteps=64)  # 64 samples
NATURAL = dataclasses.replace(CONFIG, backtrack_iters=0)
RUN = dataclasses.replace(CONFIG, total_timesteps=12 * 64)
HPARAMS = ppo.HParams(max_kl=0.01, learning_rate=0.01)


@functools.cache
def collected():
    """(network, params, optimiser state, batch, permutations); the policy is far from uniform."""
    env = envs.make(CONFIG.env, CONFIG.env_params)
    network = networks.make(CONFIG, env)

    def collect(key):
        state = ppo.init(CONFIG, HPARAMS, key)
        params = jax.tree.map(lambda x: x, state.params)
        params["params"]["actor_head"]["kernel"] *= 60
        state = state._replace(params=params)
        _, transition = agent_rollout.collect(CONFIG, env, network, state, jax.random.key(1))
        return state, estimate(CONFIG, HPARAMS, transition)

    state, batch = jax.jit(collect)(jax.random.key(3))
    return network, state.params, state.opt_state, batch, permutations(jax.random.key(2), 2, CONFIG.batch_size)


def split(params):
    """(actor, critic) as flat vectors."""
    modules = params["params"]
    return tuple(
        ravel_pytree({name: leaves for name, leaves in modules.items() if name.startswith(part)})[0]
        for part in ("actor", "critic")
    )


def joined(params, actor):
    """`params` with the actor of a flat vector."""
    modules = params["params"]
    shapes = {name: leaves for name, leaves in modules.items() if name.startswith("actor")}
    return {"params": {**modules, **ravel_pytree(shapes)[1](actor)}}


@functools.cache
def compiled_step(config):
    network, params, *_ = collected()
    return jax.jit(lambda hparams, batch: trpo.policy_step(config, hparams, network, params, batch))


@functools.cache
def compiled_improve(config):
    network, params, opt_state, _, orders = collected()
    return jax.jit(
        lambda hparams, batch: trpo.improve(
            config, hparams, network, params, opt_state, batch, orders, hparams.learning_rate
        )
    )


def policy_step(config=CONFIG, hparams=HPARAMS, **changes):
    return compiled_step(config)(floats(hparams), collected()[3]._replace(**changes))


def improve(config=CONFIG, hparams=HPARAMS, **changes):
    return compiled_improve(config)(floats(hparams), collected()[3]._replace(**changes))


def surrogate_and_kl(params, batch=None):
    """The surrogate with standardised advantages and the mean KL, in float64 NumPy."""
    network, _, _, own, _ = collected()
    batch = own if batch is None else batch

    def log_softmax(logits):
        logits = np.asarray(logits, np.float64)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    old, new = log_softmax(batch.dist_params), log_softmax(networks.policy(network, params, batch.obs))
    chosen = np.asarray(batch.action)[:, None]
    ratio = np.exp(np.take_along_axis(new - old, chosen, 1)[:, 0])
    advantages = np.asarray(batch.advantages, np.float64)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    return (ratio * advantages).mean(), (np.exp(old) * (old - new)).sum(-1).mean()


# The step


def dense_step(damping, max_kl):
    """sqrt(2 max_kl / x'Ax) x, x = A^-1 g, A = F + damping I, with F from the score of every action in every state."""
    network, params, _, batch, _ = collected()
    flat = split(params)[0]

    def log_probs(flat):
        return jax.nn.log_softmax(networks.policy(network, joined(params, flat), batch.obs))

    scores = np.asarray(jax.jit(jax.jacobian(log_probs))(flat), np.float64)  # [B, A, parameters]
    probs = np.exp(np.asarray(log_probs(flat), np.float64))
    matrix = np.einsum("ba,bai,baj->ij", probs, scores, scores) / len(probs) + damping * np.eye(len(flat))
    advantages = np.asarray(batch.advantages, np.float64)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    gradient = np.einsum("b,bi->i", advantages, scores[np.arange(len(probs)), batch.action]) / len(probs)
    direction = np.linalg.solve(matrix, gradient)
    return np.sqrt(2 * max_kl / (direction @ matrix @ direction)) * direction, np.linalg.norm(gradient)


@pytest.mark.parametrize(("damping", "max_kl"), [(0.1, 0.01), (1.0, 0.01), (0.03, 0.5)])
def test_the_natural_gradient_is_the_dense_solution(damping, max_kl):
    config = dataclasses.replace(NATURAL, cg_iters=40)
    after, grad_norm, _, step_scale = policy_step(config, ppo.HParams(cg_damping=damping, max_kl=max_kl))
    expected, norm = dense_step(damping, max_kl)
    moved = np.asarray(split(after)[0] - split(collected()[1])[0], np.float64)
    assert np.linalg.norm(moved - expected) < 5e-3 * np.linalg.norm(expected)
    np.testing.assert_allclose(grad_norm, norm, rtol=1e-4)
    assert step_scale == 1


@pytest.mark.parametrize(
    ("damping", "max_kl", "too_far"),
    [(0.001, 0.1, True), (0.01, 2.0, False)],
    ids=["the full step goes too far", "the full step makes it worse"],
)
def test_the_line_search_takes_the_largest_acceptable_fraction(damping, max_kl, too_far):
    coef = 0.7
    hparams = HPARAMS._replace(max_kl=max_kl, cg_damping=damping, backtrack_coef=coef)
    _, start, *_ = collected()
    before = split(start)[0]
    full = split(policy_step(NATURAL, hparams)[0])[0] - before
    after, _, _, step_scale = policy_step(CONFIG, hparams)
    power = round(np.log(float(step_scale)) / np.log(coef))
    assert power > 0
    np.testing.assert_allclose(step_scale, coef**power, rtol=1e-5)
    np.testing.assert_allclose(split(after)[0] - before, step_scale * full, rtol=1e-3, atol=1e-5)

    outcomes = [surrogate_and_kl(joined(start, before + coef**j * full)) for j in range(power + 1)]
    start_surrogate = surrogate_and_kl(start)[0]
    assert (outcomes[0][1] > max_kl) == too_far
    for surrogate, kl in outcomes[:-1]:
        assert kl > max_kl or surrogate <= start_surrogate
    surrogate, kl = outcomes[-1]
    assert kl <= max_kl * (1 + 1e-3)
    assert surrogate > start_surrogate


@pytest.mark.parametrize("max_kl", [1e-4, 0.01, 0.3, 3.0])
def test_the_step_keeps_to_the_bound_and_improves_on_its_batch(max_kl):
    after, _, policy_loss, step_scale = policy_step(hparams=HPARAMS._replace(max_kl=max_kl))
    surrogate, kl = surrogate_and_kl(after)
    assert step_scale > 0
    assert kl <= max_kl * (1 + 1e-3)
    assert kl > max_kl / 50
    assert surrogate > surrogate_and_kl(collected()[1])[0]
    np.testing.assert_allclose(policy_loss, -surrogate, rtol=1e-3, atol=1e-6)


def test_the_step_uses_raw_advantages_when_told_to():
    raw = dataclasses.replace(NATURAL, normalize_advantages=False)
    shifted = collected()[3].advantages + 5.0
    standardised = [split(policy_step(NATURAL, advantages=a)[0])[0] for a in (collected()[3].advantages, shifted)]
    np.testing.assert_allclose(*standardised, rtol=1e-3, atol=1e-5)
    assert np.abs(split(policy_step(raw, advantages=shifted)[0])[0] - standardised[0]).max() > 1e-3


@pytest.mark.parametrize("config", [CONFIG, NATURAL])
def test_the_scale_of_raw_advantages_does_not_matter(config):
    raw = dataclasses.replace(config, normalize_advantages=False)
    one, many = (split(policy_step(raw, advantages=scale * collected()[3].advantages)[0])[0] for scale in (1.0, 1000.0))
    np.testing.assert_allclose(one, many, rtol=1e-3, atol=1e-5)


# Nothing to learn from, and nothing finite


@pytest.mark.parametrize("config", [CONFIG, NATURAL])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_useless_advantages_leave_every_bit_of_the_actor(config, normalize, value):
    config = dataclasses.replace(config, normalize_advantages=normalize)
    advantages = jnp.full(64, value, jnp.float32)
    before = collected()[1]
    stepped, _, _, step_scale = policy_step(config, advantages=advantages)
    assert_equal(stepped, before)
    improved = improve(config, advantages=advantages)[0]
    assert_equal(split(improved)[0], split(before)[0])
    if config.backtrack_iters:
        assert step_scale == 0


def test_one_advantage_that_is_nan_is_enough_to_stay():
    advantages = collected()[3].advantages.at[3].set(jnp.nan)
    assert_equal(policy_step(advantages=advantages)[0], collected()[1])


def test_standardised_equal_advantages_leave_the_actor_alone():
    assert_close(policy_step(advantages=jnp.full(64, 3.0))[0], collected()[1], rtol=0, atol=0)


# Actor and critic


def test_the_policy_step_leaves_every_bit_of_the_critic():
    after = policy_step()[0]
    assert_equal(split(after)[1], split(collected()[1])[1])
    assert differs(split(after)[0], split(collected()[1])[0])


def test_the_critic_fit_leaves_every_bit_of_the_actor():
    after, _, improvement = improve()
    assert_equal(split(after)[0], split(policy_step()[0])[0])
    assert differs(split(after)[1], split(collected()[1])[1])
    assert improvement.num_epochs == 2


def test_the_critic_fits_its_targets():
    _, before, _, batch, _ = collected()
    network = collected()[0]
    error = lambda params: np.mean((networks.value(network, params, batch.obs) - batch.value_targets) ** 2)  # noqa: E731
    assert error(improve()[0]) < error(before)


def test_diagnostics_are_of_the_policy_after_the_step():
    after, _, improvement = improve(hparams=HPARAMS._replace(max_kl=0.3))
    surrogate, kl = surrogate_and_kl(after)
    np.testing.assert_allclose(improvement.exact_kl, kl, rtol=1e-3)
    np.testing.assert_allclose(improvement.policy_loss, -surrogate, rtol=1e-3)
    assert 0.01 < improvement.exact_kl <= 0.3
    assert 0 < improvement.clip_fraction <= 1


# Whole runs


@functools.cache
def compiled_runs():
    return jax.jit(jax.vmap(functools.partial(ppo.train, RUN)))


@functools.cache
def runs():
    """Twelve updates of eight runs, of two bounds each: hparams, metrics."""
    hparams = jax.tree.map(lambda x: jnp.full(8, x, jnp.float32), HPARAMS)
    hparams = hparams._replace(max_kl=jnp.array([0.01, 0.1] * 4), learning_rate=jnp.full(8, 0.01))
    keys = jax.random.split(jax.random.key(5), 8)
    return hparams, keys, compiled_runs()(hparams, keys)


def test_the_kl_of_every_update_of_every_run_is_within_its_bound():
    hparams, _, (_, metrics) = runs()
    assert (metrics.exact_kl <= hparams.max_kl[:, None] * (1 + 1e-3)).all()
    assert metrics.all_finite.all()
    assert np.mean(metrics.step_scale > 0) > 0.9
    moving = np.asarray(metrics.step_scale) > 0
    assert (np.asarray(metrics.exact_kl)[moving] > 0).all()
    assert set(np.unique(metrics.num_epochs)) == {RUN.num_epochs}


def test_a_run_of_a_batch_equals_the_same_run_alone():
    hparams, keys, together = runs()
    for lane in (0, 5):
        alone = compiled_train(RUN)(jax.tree.map(lambda x, i=lane: x[i], hparams), keys[lane])
        first = lambda metrics: jax.tree.map(lambda x: x[:3], metrics)  # noqa: E731 (before rounding has grown)
        metrics = jax.tree.map(lambda x, i=lane: x[i], together[1])
        assert_close(first(metrics), first(alone[1]), rtol=2e-3, atol=1e-3)


def test_one_program_for_every_bound_damping_and_backtracking():
    traces = []
    network, params, _, batch, _ = collected()

    def step(hparams):
        traces.append(1)
        return trpo.policy_step(CONFIG, hparams, network, params, batch)

    grid = ppo.grid(HPARAMS, max_kl=[0.003, 0.3], cg_damping=[0.001, 1.0], backtrack_coef=[0.3, 0.8])
    alone = jax.jit(step)
    steps = [alone(jax.tree.map(lambda x, i=i: x[i], grid)) for i in range(8)]
    assert len(traces) == 1
    for i, (after, *_) in enumerate(steps):
        surrogate, kl = surrogate_and_kl(after)
        assert kl <= grid.max_kl[i] * (1 + 1e-3)
        assert surrogate > surrogate_and_kl(params)[0]
    assert len({float(step_scale) for *_, step_scale in steps}) > 2
    together = jax.jit(jax.vmap(step))(grid)
    for i, single in enumerate(steps):
        assert_close(jax.tree.map(lambda x, i=i: x[i], together), single, rtol=2e-3, atol=1e-3)


def test_bound_damping_and_backtracking_each_change_the_step():
    hparams = HPARAMS._replace(max_kl=0.1, cg_damping=0.001)
    base = policy_step(hparams=hparams)
    for change in ({"max_kl": 0.05}, {"cg_damping": 0.5}, {"backtrack_coef": 0.8}):
        assert differs(policy_step(hparams=hparams._replace(**change))[0], base[0]), change


# CartPole over many seeds


@functools.cache
def cartpole(name):
    """Metrics [16 seeds, updates] of an experiment of `configs/`."""
    settings = experiment.read(CONFIGS / f"{name}.toml")
    result = ppo.sweep(settings.config, settings.hparams, settings.num_seeds, settings.seed)
    return settings.hparams, ppo.Metrics(*(leaf[0] for leaf in result.metrics))


@pytest.mark.slow
def test_trpo_on_cartpole_keeps_to_the_bound_in_every_update_and_learns():
    hparams, metrics = cartpole("trpo-cartpole")
    assert metrics.exact_kl.shape[0] == 16
    assert metrics.all_finite.all()
    assert (metrics.exact_kl <= hparams.max_kl * (1 + 1e-3)).all(), metrics.exact_kl.max()
    returns = results.final_return(metrics)
    print(f"interquartile mean of the final return: {results.interquartile_mean(returns):.1f}")
    assert results.interquartile_mean(returns) >= 475, returns


@pytest.mark.slow
def test_the_natural_gradient_on_cartpole_sometimes_overshoots_the_bound():
    overshoots = {}
    for name in ("npg-cartpole", "trpo-cartpole"):
        hparams, metrics = cartpole(name)
        overshoots[name] = float(np.mean(metrics.exact_kl > hparams.max_kl * (1 + 1e-3)))
    print(f"share of updates beyond max_kl: {overshoots}")
    assert overshoots["trpo-cartpole"] == 0
    assert 0 < overshoots["npg-cartpole"] < 1
