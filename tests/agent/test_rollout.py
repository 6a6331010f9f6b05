"""One rollout: what is stored is what the policy and the critic said at sampling time, at the states it says."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purejaxppo as ppo
from purejaxppo import devices
from purejaxppo.agent import envs, networks, rollout
from tests.helpers import assert_close, tiny

COUNTER = tiny(env="Counter-test", env_params={"max_steps_in_episode": 3})


@functools.cache
def rollouts(config, num=2, seed=0):
    """`num` rollouts in a row by one set of parameters: (network, states before and after [num + 1], transitions)."""
    env = envs.make(config.env, config.env_params)
    network = networks.make(config, env)
    collect = jax.jit(lambda state, key: rollout.collect(config, env, network, state, key))
    states = [jax.jit(functools.partial(ppo.init, config))(ppo.HParams(), jax.random.key(seed))]
    transitions = []
    for key in jax.random.split(jax.random.key(seed + 1), num):
        state, transition = collect(states[-1], key)
        states.append(state)
        transitions.append(transition)
    return network, states, transitions


@pytest.fixture(scope="module")
def cartpole():
    network, states, transitions = rollouts(tiny(num_steps=32, total_timesteps=64))
    return network, states[0], transitions[0]


@pytest.fixture(scope="module")
def counter():
    network, states, transitions = rollouts(COUNTER)
    return network, states, transitions


def test_the_stored_log_prob_is_that_of_the_stored_distribution(cartpole):
    _, _, transition = cartpole
    logits = np.asarray(transition.dist_params, np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = np.take_along_axis(log_probs, np.asarray(transition.action)[..., None], -1)[..., 0]
    np.testing.assert_allclose(transition.log_prob, expected, atol=1e-6)


def test_the_stored_distribution_is_the_policy_at_the_stored_observation(cartpole):
    network, state, transition = cartpole
    expected = networks.policy(network, state.params, transition.obs)
    np.testing.assert_allclose(transition.dist_params, expected, atol=1e-6)
    assert np.ptp(np.asarray(expected)) > 1e-3


def test_the_stored_value_is_the_critic_at_the_stored_observation(cartpole):
    network, state, transition = cartpole
    expected = networks.value(network, state.params, transition.obs)
    np.testing.assert_allclose(transition.value, expected, atol=1e-6)


def test_every_action_is_taken(cartpole):
    _, _, transition = cartpole
    assert set(np.unique(transition.action)) == {0, 1}


def test_the_action_of_a_step_is_the_one_the_environment_saw(cartpole):
    """Pushing right accelerates the cart to the right, from one observation to the next of the same episode."""
    _, _, transition = cartpole
    obs, action = np.asarray(transition.obs), np.asarray(transition.action)
    ended = np.asarray(transition.terminated | transition.truncated)[:-1]
    acceleration = (obs[1:, :, 1] - obs[:-1, :, 1])[~ended]
    np.testing.assert_array_equal(acceleration > 0, action[:-1][~ended] == 1)


def test_shapes_and_types(cartpole):
    _, _, transition = cartpole
    floats = ["obs", "dist_params", "log_prob", "value", "next_value", "reward", "episode_return"]
    expected = dict.fromkeys(floats, jnp.float32) | {
        "action": jnp.int32,
        "terminated": jnp.bool_,
        "truncated": jnp.bool_,
        "episode_length": jnp.int32,
    }
    assert {name: leaf.dtype for name, leaf in transition._asdict().items()} == expected
    tails = {"obs": (4,), "dist_params": (2,)}
    for name, leaf in transition._asdict().items():
        assert leaf.shape == (32, 2, *tails.get(name, ())), name


def test_observations_follow_the_environment(counter):
    _, states, (first, second) = counter
    times = np.concatenate([first.obs, second.obs])[:, :, 0]
    np.testing.assert_array_equal(times, np.broadcast_to(np.arange(16)[:, None] % 3, (16, 2)))
    np.testing.assert_array_equal(first.obs[0], states[0].obs)
    np.testing.assert_array_equal(second.obs[0], states[1].obs)


def test_next_value_is_the_critic_at_the_true_successor(counter):
    network, states, (transition, _) = counter
    successor = transition.obs + jnp.array([1.0, 0.0])  # one step later in the same episode
    expected = networks.value(network, states[0].params, successor)
    np.testing.assert_allclose(transition.next_value, expected, atol=1e-6)
    # At the end of an episode the next observation acted on is another one, of another value.
    assert (np.abs(transition.next_value[2] - transition.value[3]) > 1e-4).all()
    # Elsewhere it is the same one.
    np.testing.assert_allclose(transition.next_value[0], transition.value[1], atol=1e-6)


def test_flags_say_which_end_it_was(counter):
    _, _, (transition, _) = counter
    np.testing.assert_array_equal(transition.truncated[:, 0], [0, 0, 1, 0, 0, 1, 0, 0])
    assert not transition.terminated.any()
    _, _, (transition, _) = rollouts(tiny(env="Counter-test", env_params={"terminal_step": 3}))
    np.testing.assert_array_equal(transition.terminated[:, 0], [0, 0, 1, 0, 0, 1, 0, 0])
    assert not transition.truncated.any()


def test_rewards_belong_to_the_step_that_earned_them(counter):
    _, _, (first, second) = counter
    np.testing.assert_array_equal(first.reward[:, 0], [1, 2, 3, 1, 2, 3, 1, 2])
    np.testing.assert_array_equal(second.reward[:, 0], [3, 1, 2, 3, 1, 2, 3, 1])


def test_episode_statistics_run_on_across_rollouts(counter):
    _, states, transitions = counter
    running_return, running_length = np.zeros(2), np.zeros(2, int)
    for state, transition in zip(states[1:], transitions, strict=True):
        for t in range(8):
            running_return += np.asarray(transition.reward[t])
            running_length += 1
            np.testing.assert_array_equal(transition.episode_return[t], running_return)
            np.testing.assert_array_equal(transition.episode_length[t], running_length)
            ended = np.asarray(transition.terminated[t] | transition.truncated[t])
            running_return[ended] = 0
            running_length[ended] = 0
        np.testing.assert_array_equal(state.episode_return, running_return)
        np.testing.assert_array_equal(state.episode_length, running_length)
    # The third episode began in the first rollout (two of its steps) and ended on the first step of the second.
    np.testing.assert_array_equal(transitions[1].episode_return[0], [6, 6])
    np.testing.assert_array_equal(transitions[1].episode_length[0], [3, 3])


def test_every_reset_draws_its_own_numbers(counter):
    _, _, (first, second) = counter
    starts = np.concatenate([first.obs, second.obs])[:, :, 1][np.arange(0, 16, 3)]  # the first step of each episode
    assert len(np.unique(starts)) == starts.size


def test_collecting_changes_the_environments_alone(counter):
    _, (before, after, _), _ = counter
    jax.tree.map(np.testing.assert_array_equal, before.params, after.params)
    jax.tree.map(np.testing.assert_array_equal, before.opt_state, after.opt_state)
    assert before.update_index == after.update_index


def test_another_key_draws_other_actions_and_the_same_key_the_same():
    config = tiny(num_steps=32, total_timesteps=64)
    _, _, (first, second) = rollouts(config)
    assert (np.asarray(first.action) != np.asarray(second.action)).any()
    rollouts.cache_clear()
    _, _, (again, _) = rollouts(config)
    jax.tree.map(np.testing.assert_array_equal, first, again)


def test_environments_of_one_run_draw_different_actions(cartpole):
    _, _, transition = cartpole
    assert (np.asarray(transition.action[:, 0]) != np.asarray(transition.action[:, 1])).any()


def collected(config, time_limit=None):
    """One rollout of this config, (state after it, transition), as if the environment's time limit were another."""
    env = envs.make(config.env, config.env_params)
    env = dataclasses.replace(env, time_limit=time_limit or env.time_limit)
    network = networks.make(config, env)

    def collect(key):
        state = ppo.init(config, ppo.HParams(), key)
        return rollout.collect(config, env, network, state, jax.random.key(1))

    return jax.jit(collect)(jax.random.key(0))


@pytest.mark.parametrize(
    ("num_steps", "limit", "stretches"), [(32, 6, 8), (32, 7, 8), (32, 8, 4), (30, 9, 5), (7, 5, 7)]
)
def test_final_observations_valued_where_truncated_alone_are_those_valued_everywhere(num_steps, limit, stretches):
    """CartPole falls after nine steps or more, so every episode reaches a limit below."""
    config = tiny(num_steps=num_steps, total_timesteps=2 * num_steps, env_params={"max_steps_in_episode": limit})
    assert envs.make(config.env, config.env_params).time_limit == limit
    assert rollout.num_stretches(num_steps, limit) == stretches
    (_, few), (_, all_) = collected(config), collected(config, time_limit=1)
    assert few.truncated.sum() == 2 * (num_steps // limit)
    assert_close(few, all_)
    assert (np.abs(few.next_value - np.roll(few.value, -1, 0))[np.asarray(few.truncated)] > 1e-6).all()


@pytest.mark.parametrize(
    ("num_steps", "limit", "expected"),
    [(128, 500, 1), (128, 128, 1), (128, 127, 2), (128, 64, 2), (128, 1, 128), (12, 5, 3), (7, 6, 7), (1, 3, 1)],
)
def test_stretches_are_equal_and_no_longer_than_the_limit(num_steps, limit, expected):
    assert rollout.num_stretches(num_steps, limit) == expected


def test_a_terminal_state_has_no_value():
    _, transition = collected(tiny(env="Counter-test", env_params={"terminal_step": 3, "max_steps_in_episode": 3}))
    np.testing.assert_array_equal(transition.next_value[2], 0.0)
    assert (transition.next_value[:2] != 0).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"num_steps": 32},
        {"env": "Pendulum-v1", "normalize_observations": True},
        {"env": "MemoryChain-bsuite", "network": "gru"},
        {"env": "FrozenLake-misc"},
        {"env": "Masked-test"},
    ],
    ids=lambda changes: changes.get("env", "CartPole-v1"),
)
def test_one_environment_after_another_is_the_same_rollout(changes, monkeypatch):
    config = tiny(**changes, num_envs=4, total_timesteps=4 * changes.get("num_steps", 8))
    monkeypatch.setattr(devices, "has_kernel_loops", lambda: False)
    state, transition = collected(config)
    monkeypatch.setattr(devices, "has_kernel_loops", lambda: True)
    assert rollout.steps_in_turn(config)
    turn_state, turn_transition = collected(config)
    assert_close(turn_transition, transition)
    assert_close(turn_state, state)


@pytest.mark.parametrize("changes", [{"num_envs": 9}, {"hidden_sizes": (65,)}, {"network": "cnn"}])
def test_large_or_many_environments_step_side_by_side(changes):
    assert rollout.steps_in_turn(ppo.Config())
    assert not rollout.steps_in_turn(tiny(**changes, total_timesteps=1000))
