"""The bandit: the text's exact figures, a slow NumPy twin, limits, and bad input."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purejaxppo import bandit, ops
from purejaxppo.bandit import BanditConfig, BanditHParams

# Pulls of arms A, B, B, C with rewards 0.5, 1.5, 0.5, -2.5, whose mean is 0.
ACTIONS = jnp.array([0, 1, 1, 2])
ADVANTAGES = jnp.array([0.5, 1.5, 0.5, -2.5])
UNIFORM = jnp.zeros(3)
SMALL = BanditConfig(num_pulls=6, num_epochs=5, num_iterations=4)

simulate = jax.jit(bandit.simulate, static_argnums=0)
ascend = jax.jit(bandit.ascend, static_argnums=4)


def everything(trace):
    return trace


def settle(hparams, num_steps):
    """Policy and KL after ascent on the four pulls, with the step before it to see that nothing moves any more."""
    path = ascend(ACTIONS, ADVANTAGES, UNIFORM, hparams, num_steps)
    return jax.nn.softmax(path[-1]), ops.kl_categorical(UNIFORM, path[-1]), path


# --- the two-action policy


@pytest.mark.parametrize(("theta", "kl", "fisher", "half"), [(0.0, 0.120, 0.25, 0.125), (4.0, 0.0066, 0.0177, 0.0088)])
def test_step_of_one_costs_less_kl_where_the_policy_is_confident(theta, kl, fisher, half):
    assert bandit.sigmoid_kl(theta, theta + 1) == pytest.approx(kl, abs=5e-4 if theta == 0 else 5e-5)
    assert bandit.sigmoid_fisher(theta) == pytest.approx(fisher, abs=5e-5)
    assert bandit.sigmoid_fisher(theta) / 2 == pytest.approx(half, abs=5e-5)


@pytest.mark.parametrize(
    ("theta", "gradient", "step", "kl"),
    [(0.0, 0.250, 0.283, 0.0100), (2.0, 0.105, 0.436, 0.0090), (4.0, 0.018, 1.064, 0.0073)],
)
def test_natural_step_table(theta, gradient, step, kl):
    natural = bandit.sigmoid_natural_step(theta, 0.01)
    assert bandit.sigmoid_fisher(theta) == pytest.approx(gradient, abs=5e-4)
    assert natural == pytest.approx(step, abs=5e-4)
    assert bandit.sigmoid_kl(theta, theta + natural) == pytest.approx(kl, abs=5e-5)


def test_eleven_natural_steps_against_107_plain_ones():
    for step, steps in ((bandit.sigmoid_natural_step, 11), (bandit.sigmoid_fisher, 107)):
        confident = jax.nn.sigmoid(bandit.sigmoid_ascend(0.0, step, 120)) >= 0.99
        assert int(jnp.argmax(confident)) == steps


def test_fisher_is_the_second_derivative_of_the_kl_and_natural_steps_stay_finite():
    curvature = jax.grad(jax.grad(bandit.sigmoid_kl, 1), 1)(1.3, 1.3)
    assert float(curvature) == pytest.approx(float(bandit.sigmoid_fisher(1.3)), rel=1e-4)
    assert np.isfinite(bandit.sigmoid_natural_step(jnp.array([-80.0, 80.0]))).all()


# --- the exact KL


def test_exact_kl_by_hand_both_ways():
    old, new = jnp.log(jnp.array([0.5, 0.3, 0.2])), jnp.log(jnp.array([0.4, 0.4, 0.2]))
    assert ops.kl_categorical(old, new) == pytest.approx(0.02527, abs=5e-6)
    assert ops.kl_categorical(new, old) == pytest.approx(0.02582, abs=5e-6)
    assert ops.kl_categorical(old + 7.0, old) == pytest.approx(0.0, abs=1e-6)


def test_exact_kl_of_impossible_actions():
    never, always = jnp.array([0.0, -jnp.inf]), jnp.array([0.0, 0.0])
    assert ops.kl_categorical(never, always) == pytest.approx(math.log(2))
    assert ops.kl_categorical(never, never) == 0.0
    assert ops.kl_categorical(always, never) == jnp.inf
    assert np.isfinite(jax.grad(ops.kl_categorical, 1)(never, always)).all()


# --- the four pulls


def test_surrogate_of_the_four_pulls_is_linear_in_the_policy():
    def value(policy):
        return ops.surrogate(jnp.log(3 * policy)[ACTIONS], ADVANTAGES).mean()

    policy = jnp.array([0.2, 0.5, 0.3])
    np.testing.assert_allclose(jax.grad(value)(policy), [0.375, 1.5, -1.875], rtol=1e-6)
    assert value(policy) == pytest.approx(float(policy @ jnp.array([0.375, 1.5, -1.875])))


@pytest.mark.parametrize(
    ("rate", "policy", "kl"),
    [(0.05, (0.40, 0.40, 0.20), 0.051), (1.0, (0.41, 0.44, 0.16), 0.098), (3.0, (0.43, 0.55, 0.03), 0.576)],
)
def test_clipped_ascent_on_the_four_pulls_until_nothing_changes(rate, policy, kl):
    final, final_kl, path = settle(BanditHParams(learning_rate=rate, clip_eps=0.2), 2000)
    np.testing.assert_array_equal(path[-1], path[-2])
    np.testing.assert_allclose(final, policy, atol=0.0051)
    assert final_kl == pytest.approx(kl, abs=5e-4)


def test_unclipped_ascent_on_the_four_pulls_runs_to_the_wrong_corner():
    final, final_kl, path = settle(BanditHParams(learning_rate=3.0, clip_eps=math.inf), 2000)
    np.testing.assert_allclose(final, [0, 1, 0], atol=1e-3)
    assert final @ jnp.array([1.0, 0.6, 0.0]) == pytest.approx(0.6, abs=1e-3)
    kls = ops.kl_categorical(jnp.broadcast_to(UNIFORM, path.shape), path)
    assert final_kl > 3
    assert (np.diff(kls) > 0).all()


def test_clipped_ceiling_and_the_closest_policy_that_reaches_it():
    closest = jnp.array([0.4, 0.4, 0.2])

    def value(policy):
        return ops.clipped_surrogate(jnp.log(3 * policy)[ACTIONS], ADVANTAGES, 0.2).mean()

    assert value(closest) == pytest.approx(0.25, abs=1e-6)
    assert ops.kl_categorical(UNIFORM, jnp.log(closest)) == pytest.approx(0.049, abs=5e-4)
    policies = jax.random.dirichlet(jax.random.key(0), jnp.ones(3), (2000,))
    values = jax.vmap(value)(policies)
    assert values.max() <= 0.25 + 1e-6
    reaching = policies[values >= 0.25 - 1e-6]
    assert len(reaching) > 0
    uniform = jnp.broadcast_to(UNIFORM, reaching.shape)
    assert ops.kl_categorical(uniform, jnp.log(reaching)).min() >= 0.0489


def test_reinforce_gradient_reused_on_one_batch_is_constant():
    def reinforce(logits):
        return (jax.nn.log_softmax(logits)[ACTIONS] * ADVANTAGES).sum()

    for logits in (UNIFORM, jnp.array([1.0, -2.0, 0.5])):
        np.testing.assert_allclose(jax.grad(reinforce)(logits), [0.5, 2.0, -2.5], atol=1e-6)


def test_first_step_is_the_policy_gradient():
    path = ascend(ACTIONS, ADVANTAGES, UNIFORM, BanditHParams(learning_rate=1.0), 1)
    np.testing.assert_allclose(path[1] - path[0], np.array([0.5, 2.0, -2.5]) / 4, atol=1e-6)


def test_batch_of_one_arm_teaches_nothing():
    logits = jnp.array([0.3, 1.0, -0.5])
    path = ascend(jnp.array([1, 1, 1]), jnp.array([1.0, -0.25, -0.75]), logits, BanditHParams(clip_eps=math.inf), 40)
    np.testing.assert_array_equal(path, jnp.broadcast_to(logits, path.shape))


def test_ascend_ascends_the_mean_of_the_ops():
    """The sums over arms are only an economy: the gradient is that of the mean over pulls."""
    logits, key = jnp.array([0.5, -0.3, 0.1, 0.0]), jax.random.key(3)
    actions, advantages = jax.random.randint(key, (50,), 0, 4), jax.random.normal(key, (50,))
    hparams = BanditHParams(learning_rate=0.7, clip_eps=0.1)

    def objective(z):
        log_ratio = (jax.nn.log_softmax(z) - jax.nn.log_softmax(logits))[actions]
        return ops.clipped_surrogate(log_ratio, advantages, 0.1).mean()

    path = ascend(actions, advantages, logits, hparams, 6)
    for before, after in itertools.pairwise(path):
        np.testing.assert_allclose(after, before + 0.7 * jax.grad(objective)(before), atol=1e-6)


# --- the twin


def twin_log_softmax(logits):
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def twin(config, hparams, uniforms, normals):
    """`simulate` in float64, pull by pull, with the smallest distance of any comparison from its edge."""
    means, std, rate, eps = (np.asarray(x, np.float64) for x in hparams)
    logits, margin, rows = np.zeros(len(means)), np.inf, []
    for u, z in zip(uniforms, normals, strict=True):
        old = twin_log_softmax(logits)
        cumulative = np.cumsum(np.exp(old))
        margin = min(margin, np.abs(u[:, None] - cumulative[:-1]).min())
        actions = np.array([int((x >= cumulative[:-1]).sum()) for x in u])
        rewards = means[actions] + std * z
        advantages = rewards - rewards.mean()
        kls, fractions = [], []
        for _ in range(config.num_epochs):
            log_probs, gradient = twin_log_softmax(logits), np.zeros_like(logits)
            for action, advantage in zip(actions, advantages, strict=True):
                ratio = np.exp(log_probs[action] - old[action])
                margin = min(margin, abs(abs(ratio - 1) - eps)) if np.isfinite(eps) else margin
                if (advantage > 0 and ratio > 1 + eps) or (advantage < 0 and ratio < 1 - eps):
                    continue
                gradient += ratio * advantage * (np.eye(len(means))[action] - np.exp(log_probs)) / config.num_pulls
            logits = logits + rate * gradient
            new = twin_log_softmax(logits)
            kls.append(np.sum(np.exp(old) * (old - new)))
            fractions.append(np.mean(np.abs(np.exp(new - old)[actions] - 1) > eps))
            if np.isfinite(eps):
                margin = min(margin, np.abs(np.abs(np.exp(new - old)[actions] - 1) - eps).min())
        rows.append((np.exp(new), kls, fractions))
    policy, kls, fractions = (np.array(x) for x in zip(*rows, strict=True))
    return np.concatenate([np.full((1, len(means)), 1 / len(means)), policy]), kls, fractions, margin


@pytest.mark.parametrize("clip_eps", [0.2, math.inf])
@pytest.mark.parametrize("means", [(1.0, 0.6, 0.0), (0.2, -0.4, 1.1, 0.9, 0.0)])
def test_numpy_twin_agrees_step_by_step_on_the_same_draws(clip_eps, means):
    """Where no comparison is closer to its edge than float32 can tell, and that must be most runs."""
    config = BanditConfig(num_pulls=9, num_epochs=12, num_iterations=6)
    hparams, compared = BanditHParams(means, 0.8, 0.9, clip_eps), 0
    for key in jax.random.split(jax.random.key(0), 10):
        trace = simulate(config, hparams, key)
        policy, kls, fractions, margin = twin(config, hparams, *(np.asarray(x) for x in bandit.draw(config, key)))
        if margin < 2e-5:
            continue
        compared += 1
        np.testing.assert_allclose(trace.policy, policy, atol=1e-4)
        np.testing.assert_allclose(trace.step_kl, kls, atol=2e-4)
        np.testing.assert_allclose(trace.step_clip_fraction, fractions, atol=1e-6)
        np.testing.assert_allclose(trace.expected_reward, policy @ np.array(means), atol=1e-4)
        np.testing.assert_allclose(trace.entropy, -(policy * np.log(policy + 1e-300)).sum(-1), atol=5e-4)
        np.testing.assert_array_equal(trace.kl, trace.step_kl[:, -1])
    assert compared >= 6


# --- limits and identities


def test_one_step_makes_the_learners_identical_bitwise():
    config = BanditConfig(num_epochs=1)
    policies = bandit.simulate_seeds(config, BanditHParams(clip_eps=[0.2, math.inf]), 50).policy
    np.testing.assert_array_equal(policies[0], policies[1])
    single = [simulate(config, BanditHParams(clip_eps=eps), jax.random.key(1)).policy for eps in (0.2, math.inf)]
    np.testing.assert_array_equal(*single)


@pytest.mark.parametrize("clip_eps", [0.2, math.inf])
def test_one_pull_leaves_the_policy_unchanged_bitwise(clip_eps):
    trace = simulate(BanditConfig(num_pulls=1), BanditHParams(clip_eps=clip_eps), jax.random.key(0))
    np.testing.assert_array_equal(trace.policy, jnp.broadcast_to(trace.policy[0], trace.policy.shape))
    np.testing.assert_array_equal(trace.kl, 0)


@pytest.mark.parametrize("clip_eps", [0.05, 0.2, math.inf])
@pytest.mark.parametrize("means", [(1.0, 0.6, 0.0), (1e4, 0.0)])
def test_huge_learning_rate_saturates_without_nan(clip_eps, means):
    trace = bandit.simulate_seeds(BanditConfig(), BanditHParams(means, 1.0, 1e6, clip_eps), 200)
    for leaf in trace:
        assert np.isfinite(leaf).all()
    assert (trace.policy[:, :, -1].max(-1) > 0.999).mean() > 0.9


def test_learners_are_the_same_until_the_first_clip():
    """The same key gives the same random numbers: before any ratio leaves the band nothing tells the learners apart."""
    for key in jax.random.split(jax.random.key(0), 5):
        wide, none = (simulate(BanditConfig(), BanditHParams(clip_eps=eps), key) for eps in (0.5, math.inf))
        clipped = np.argmax(np.append(wide.step_clip_fraction[0] > 0, True))
        np.testing.assert_array_equal(wide.step_kl[0, : clipped + 1], none.step_kl[0, : clipped + 1])
        assert clipped > 0


def test_never_chooses_an_arm_of_probability_zero():
    logits = jnp.array([-1e4, 0.0, -1e4, 0.3, -1e4])
    edges = jnp.array([2.0**-24, 0.5, 1.0 - 2.0**-24])
    uniforms = jnp.concatenate([edges, bandit.draw(BanditConfig(2000, 1, 1), jax.random.key(0))[0][0]])
    arms = np.asarray(bandit.choose(logits, uniforms))
    assert set(arms) == {1, 3}
    assert (arms[3:] == 3).mean() == pytest.approx(1 / (1 + math.exp(-0.3)), abs=0.04)


def test_clip_fraction_and_entropy_are_what_they_say():
    trace = simulate(BanditConfig(), BanditHParams(clip_eps=0.2), jax.random.key(0))
    assert trace.entropy[0] == pytest.approx(math.log(3))
    assert trace.expected_reward[0] == pytest.approx(1.6 / 3)
    pulls = np.asarray(trace.step_clip_fraction) * 12
    np.testing.assert_allclose(pulls, pulls.round(), atol=1e-5)
    assert (pulls > 0).any()
    assert (simulate(BanditConfig(), BanditHParams(clip_eps=math.inf), jax.random.key(0)).step_clip_fraction == 0).all()


@pytest.mark.parametrize(
    "change", [{"means": (1.0, 0.7, 0.0)}, {"reward_std": 1.1}, {"learning_rate": 0.9}, {"clip_eps": 0.3}]
)
def test_each_hyperparameter_changes_the_trace(change):
    base = simulate(SMALL, BanditHParams(), jax.random.key(0))
    assert not np.array_equal(base.policy, simulate(SMALL, BanditHParams(**change), jax.random.key(0)).policy)


def test_shapes_follow_the_config_and_a_longer_run_of_means():
    config = BanditConfig(num_pulls=5, num_epochs=3, num_iterations=4)
    trace = simulate(config, BanditHParams(means=tuple(range(7))), jax.random.key(0))
    shapes = [leaf.shape for leaf in trace]
    assert shapes == [(5, 7), (5,), (5,), (4,), (4, 3), (4, 3)]
    assert all(leaf.dtype == jnp.float32 for leaf in trace)


# --- many runs


def test_many_seeds_equal_single_runs_and_one_program_serves_all_hyperparameters():
    means = np.array([[1.0, 0.6, 0.0], [0.0, 2.0, 0.0]])
    trace = bandit.simulate_seeds(SMALL, BanditHParams(means=means, clip_eps=[0.2, math.inf]), 5, seed=7)
    for setting, (mean, eps) in enumerate(zip(means, [0.2, math.inf], strict=True)):
        for seed in range(5):
            key = jax.random.fold_in(jax.random.key(7), seed)
            single = simulate(SMALL, BanditHParams(means=mean, clip_eps=eps), key)
            for many, one in zip(trace, single, strict=True):
                np.testing.assert_allclose(many[setting, seed], one, atol=2e-6)


def test_seeds_are_the_same_however_many_and_in_whatever_pieces(monkeypatch):
    whole = bandit.simulate_seeds(SMALL, BanditHParams(), 23)
    few = bandit.simulate_seeds(SMALL, BanditHParams(), 3)
    monkeypatch.setattr(bandit, "CHUNK", 4)
    pieces = list(bandit.stream_seeds(SMALL, BanditHParams(), 23, summarize=everything))
    assert len(pieces) > 1
    np.testing.assert_allclose(np.concatenate([piece.policy for piece in pieces], axis=1), whole.policy, atol=2e-6)
    np.testing.assert_allclose(few.policy, whole.policy[:, :3], atol=2e-6)
    assert whole.policy.shape == (1, 23, 5, 3)


def test_vmap_over_hyperparameters_and_tuples_of_traced_means():
    grid = BanditHParams(means=(jnp.array([1.0, 0.0]), jnp.array([0.5, 2.0])), learning_rate=jnp.array([1.0, 0.5]))
    axes = BanditHParams(means=(0, 0), reward_std=None, learning_rate=0, clip_eps=None)
    traces = jax.jit(jax.vmap(lambda h, k: bandit.simulate(SMALL, h, k), (axes, None)))(grid, jax.random.key(0))
    single = simulate(SMALL, BanditHParams(means=(0.0, 2.0), learning_rate=0.5), jax.random.key(0))
    np.testing.assert_allclose(traces.policy[1], single.policy, atol=2e-6)


def test_wrong_arm():
    policy = jnp.array([[0.5, 0.3, 0.2], [0.3, 0.5, 0.2], [0.4, 0.4, 0.2]])
    np.testing.assert_array_equal(bandit.on_wrong_arm(policy, jnp.array([1.0, 0.6, 0.0])), [False, True, False])
    np.testing.assert_array_equal(bandit.on_wrong_arm(policy, jnp.array([1.0, 1.0, 0.0])), [False, False, False])


# --- bad input


@pytest.mark.parametrize("name", ["num_pulls", "num_epochs", "num_iterations"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
def test_bad_sizes(name, value):
    with pytest.raises(ValueError, match=rf"config.{name} = .*: must be a positive integer"):
        BanditConfig(**{name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"means": ()}, r"hparams.means = \(\): must be the means of two arms or more, not 0"),
        ({"means": (1.0,)}, r"hparams.means = \(1.0,\): must be the means of two arms or more, not 1"),
        ({"means": 1.0}, r"hparams.means = 1.0: must be the means of two arms or more, not 1"),
        ({"means": (1.0, math.nan)}, r"hparams.means = nan: must be in \(-inf, inf\)"),
        ({"means": (1.0, math.inf)}, r"hparams.means = inf: must be in"),
        ({"means": ("a", "b")}, r"hparams.means = .*: must be a number"),
        ({"reward_std": 0.0}, r"hparams.reward_std = 0: must be in \(0, inf\)"),
        ({"reward_std": -1.0}, r"hparams.reward_std = -1: must be in"),
        ({"learning_rate": 0.0}, r"hparams.learning_rate = 0: must be in \(0, inf\)"),
        ({"learning_rate": math.nan}, r"hparams.learning_rate = nan: must be in"),
        ({"clip_eps": 0.0}, r"hparams.clip_eps = 0: must be in \(0, inf\]"),
        ({"clip_eps": math.nan}, r"hparams.clip_eps = nan: must be in"),
    ],
)
def test_bad_hyperparameters(change, message):
    hparams = BanditHParams(**change)
    with pytest.raises(ValueError, match=message) as error:
        bandit.simulate(SMALL, hparams, jax.random.key(0))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=message):
        bandit.simulate_seeds(SMALL, hparams, 2)


def test_bad_number_of_seeds_and_lengths():
    for number in (0, -3, 2.5):
        with pytest.raises(ValueError, match=r"num_seeds = .*: must be a positive integer"):
            bandit.simulate_seeds(SMALL, BanditHParams(), number)
    with pytest.raises(ValueError, match="must be absent or of one length"):
        bandit.simulate_seeds(SMALL, BanditHParams(learning_rate=[1.0, 2.0], clip_eps=[0.1, 0.2, 0.3]), 2)


def test_tracers_pass_unchecked():
    trace = simulate(SMALL, BanditHParams(reward_std=-1.0), jax.random.key(0))
    assert np.isfinite(trace.policy).all()
