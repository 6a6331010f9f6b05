"""Running normalisation: which statistics apply when, what they are of, and that metrics stay raw."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purejaxppo as ppo
from purejaxppo import ops
from purejaxppo.agent import envs, networks, rollout
from purejaxppo.train import estimate, normalize_rewards
from tests.helpers import assert_equal, differs, floats, leaves, tiny

DRIFT = tiny(env="Drift-test", normalize_observations=True, normalize_rewards=True, num_envs=4, total_timesteps=5 * 32)
HPARAMS = floats(ppo.HParams(learning_rate=0.02))
GAMMA = 0.5


@functools.cache
def program(config):
    """(network, initial state, (state, key) -> (state, transition, its batch), update)."""
    env = envs.make(config.env, config.env_params)
    network = networks.make(config, env)

    def collect(state, key):
        after, transition = rollout.collect(config, env, network, state, key)
        return after, transition, estimate(config, HPARAMS, transition)

    start = jax.jit(functools.partial(ppo.init, config))(HPARAMS, jax.random.key(0))
    update = jax.jit(lambda state, hparams: ppo.update(config, hparams, state))
    return network, start, jax.jit(collect), update


def scores(stats, obs):
    """In float64, from the statistics."""
    mean, m2 = np.asarray(stats.mean, np.float64), np.asarray(stats.m2, np.float64)
    return np.clip((np.asarray(obs, np.float64) - mean) / np.sqrt(m2 / float(stats.count) + 1e-8), -10, 10)


def test_the_first_observation_of_all_is_normalised():
    _, state, collect, _ = program(DRIFT)
    _, transition, _ = collect(state, jax.random.key(1))
    np.testing.assert_allclose(transition.obs[0], scores(state.obs_stats, state.obs), atol=1e-5)
    np.testing.assert_allclose(transition.obs[0].mean(0), 0.0, atol=1e-5)
    assert np.abs(state.obs).min() > 0  # about 5 and about 10,000 as the environment gave them


def test_a_rollout_is_normalised_by_the_statistics_that_it_started_with():
    _, state, collect, _ = program(DRIFT)
    state, _, _ = collect(state, jax.random.key(0))
    after, transition, batch = collect(state, jax.random.key(1))
    assert differs(after.obs_stats, state.obs_stats)
    # The second feature is 10,000 + the steps of the episode so far.
    steps = (10_000 + np.asarray(transition.episode_length) - 1)[..., None]
    expected = scores(state.obs_stats, np.concatenate([steps, steps], -1))[..., 1]
    np.testing.assert_allclose(transition.obs[..., 1], expected, atol=2e-3)  # float32 beside 10,000
    np.testing.assert_array_equal(batch.obs, transition.obs.reshape(32, 2))


def test_statistics_are_of_every_observation_acted_on():
    """One pseudo-sample of variance 1 at the mean of the first observations, and then all raw ones, once each."""
    config = tiny(env="Counter-test", normalize_observations=True, env_params={"max_steps_in_episode": 3})
    _, state, collect, _ = program(config)
    after, _, _ = collect(state, jax.random.key(1))
    raw = program(tiny(env="Counter-test", env_params={"max_steps_in_episode": 3}))[2](
        state._replace(obs_stats=()), jax.random.key(1)
    )[1].obs
    samples = np.asarray(raw, np.float64).reshape(16, 2)
    first = np.asarray(state.obs, np.float64).mean(0)
    mean = (first + samples.sum(0)) / 17
    variance = (1 + (first - mean) ** 2 + ((samples - mean) ** 2).sum(0)) / 17
    assert after.obs_stats.count == 17
    np.testing.assert_allclose(after.obs_stats.mean, mean, rtol=1e-5)
    np.testing.assert_allclose(after.obs_stats.variance, variance, rtol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"env": "CartPole-v1", "normalize_observations": True},
        {"env": "Echo-test"},
        {"env": "Echo-test", "squash": True},
        {"env": "Echo-test", "rescale_actions": True, "normalize_observations": True},
    ],
)
def test_every_ratio_is_1_before_the_first_step(changes):
    """Also with actions far outside their bounds, and far out on the tanh."""
    config = tiny(**changes)
    network, state, collect, _ = program(config)
    if config.env == "Echo-test":
        params = {"params": state.params["params"] | {"actor_log_std": jnp.full(2, 1.5)}}
        state = state._replace(params=params)
    for key in jax.random.split(jax.random.key(1), 2):
        after, _, batch = collect(state, key)
        if config.env == "Echo-test":
            assert np.abs(batch.action).max() > 4
        policy = network.actions.distribution(networks.policy(network, state.params, batch.obs))
        log_prob = policy.log_prob(batch.action)
        np.testing.assert_allclose(np.exp(log_prob - batch.log_prob), 1.0, atol=1e-5)
        state = after


def test_the_environment_sees_the_clipped_action_and_the_stored_one_is_not():
    _, state, collect, _ = program(tiny(env="Echo-test"))
    state = state._replace(params={"params": state.params["params"] | {"actor_log_std": jnp.full(2, 2.0)}})
    _, transition, _ = collect(state, jax.random.key(1))
    seen, action = np.asarray(transition.obs), np.asarray(transition.action)
    same_episode = ~np.asarray(transition.truncated)[:-1]
    clipped = np.clip(action, [-1, 0], [1, 4])
    np.testing.assert_allclose(seen[1:][same_episode], clipped[:-1][same_episode], rtol=1e-6)
    assert (np.abs(action) > 4).any()
    np.testing.assert_allclose(transition.reward, -((clipped - [0.5, 1.0]) ** 2).sum(-1), rtol=1e-5)


def test_rewards_are_divided_by_the_deviation_of_their_discounted_sums():
    """Rewards 1, 2, 3 an episode and gamma 0.5: sums 1, 2.5, 4.25, and again."""
    _, state, collect, _ = program(DRIFT)
    state, transition, _ = collect(state, jax.random.key(1))
    after, scaled = normalize_rewards(state, transition, jnp.float32(GAMMA))
    np.testing.assert_array_equal(transition.reward[:, 0], [1, 2, 3, 1, 2, 3, 1, 2])
    sums = np.array([1, 2.5, 4.25, 1, 2.5, 4.25, 1, 2.5])
    np.testing.assert_allclose(after.reward_stats.variance, sums.var(), rtol=1e-5)
    np.testing.assert_allclose(scaled.reward[:, 0], np.asarray(transition.reward[:, 0]) / sums.std(), rtol=1e-5)
    np.testing.assert_allclose(after.discounted_sum, np.full(4, 2.5))
    # The next rollout goes on with 3 + 0.5 * 2.5 = 4.25, and counts both rollouts.
    state, transition, _ = collect(after, jax.random.key(2))
    after, scaled = normalize_rewards(state, transition, jnp.float32(GAMMA))
    both = np.concatenate([sums, [4.25, 1, 2.5, 4.25, 1, 2.5, 4.25, 1]])
    np.testing.assert_allclose(scaled.reward[:, 0], np.asarray(transition.reward[:, 0]) / both.std(), rtol=1e-5)
    np.testing.assert_allclose(after.discounted_sum, np.ones(4))


def test_metrics_and_evaluation_show_raw_returns_and_evaluation_learns_nothing():
    _, state, _, update = program(DRIFT)
    for _ in range(3):
        state, metrics = update(state, HPARAMS)
        assert metrics.episode_return == 1 + 2 + 3
        assert metrics.all_finite
    before = leaves(state)
    episodes = jax.jit(lambda state: ppo.evaluate(DRIFT, state, jax.random.key(3), 6))(state)
    np.testing.assert_array_equal(episodes.episode_return, np.full(6, 6.0))
    jax.tree.map(np.testing.assert_array_equal, before, leaves(state))


def test_evaluation_acts_on_normalised_observations():
    """A policy of the standard score alone: with other statistics the same raw observations get other actions."""
    config = tiny(env="ObservationActionReward-test", normalize_observations=True)
    _, state, _, _ = program(config)
    evaluate = jax.jit(lambda state: ppo.evaluate(config, state, jax.random.key(3), 64).episode_return)
    head = state.params["params"]["actor_head"]
    params = {"params": state.params["params"] | {"actor_head": head | {"kernel": head["kernel"] * 100}}}
    for offset in (-2.0, 0.0, 2.0):
        stats = ops.Moments(jnp.ones(()), jnp.full(1, offset), jnp.ones(1))
        obs = jnp.array([[-1.0], [1.0]])
        network = networks.make(config, envs.make(config.env))
        _, actions, _ = networks.act(network, params, stats, obs, jnp.zeros((2, 2)))
        assert_equal(actions, jnp.argmax(networks.policy(network, params, obs - offset), -1).astype(jnp.int32))
        correct = np.asarray(actions == jnp.array([0, 1]))
        returns = np.asarray(evaluate(state._replace(params=params, obs_stats=stats)))
        assert set(returns) == {1.0 if right else -1.0 for right in correct}


@pytest.mark.slow
def test_runs_of_a_batch_have_statistics_of_their_own():
    keys = jax.random.split(jax.random.key(0), 3)
    states, metrics = jax.jit(jax.vmap(functools.partial(ppo.train, DRIFT), (None, 0)))(HPARAMS, keys)
    alone, _ = jax.jit(functools.partial(ppo.train, DRIFT))(HPARAMS, keys[1])
    assert states.obs_stats.mean.shape == (3, 2)
    assert differs(states.obs_stats.mean[0], states.obs_stats.mean[1])
    np.testing.assert_allclose(states.obs_stats.mean[1], alone.obs_stats.mean, rtol=1e-5)
    np.testing.assert_allclose(states.reward_stats.variance[1], alone.reward_stats.variance, rtol=1e-5)
    assert metrics.all_finite.all()


@pytest.mark.parametrize("normalize", [pytest.param(False, marks=pytest.mark.slow), True])
def test_observations_that_are_not_numbers_are_reported_and_harm_no_other_run(normalize):
    """One environment of run 0 shows NaN until its first episode ends."""
    config = tiny(env="Drift-test", normalize_observations=normalize)
    keys = jax.random.split(jax.random.key(0), 2)
    start = jax.jit(jax.vmap(functools.partial(ppo.init, config, HPARAMS)))(keys)
    update = jax.jit(jax.vmap(functools.partial(ppo.update, config, HPARAMS)))
    broken = start._replace(env_state=start.env_state.replace(sign=start.env_state.sign.at[0, 1].set(jnp.nan)))
    healthy, harmed = update(start), update(broken)
    np.testing.assert_array_equal(healthy[1].all_finite, [True, True])
    np.testing.assert_array_equal(harmed[1].all_finite, [False, True])
    np.testing.assert_array_equal(update(harmed[0])[1].all_finite, [False, True])
    assert_equal(*(jax.tree.map(lambda x: x[1], result) for result in (healthy, harmed)))
