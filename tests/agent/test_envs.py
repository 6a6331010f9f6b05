"""Environments: every registered one fits or is refused, and a scripted one shows each field of a step."""

import urllib.error

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces

from purejaxppo.agent import envs
from tests.helpers import run_python

BUILTIN = [name for name in gymnax.registered_envs if not name.endswith("-test")]
BOX_ACTIONS = [
    "MountainCarContinuous-v0",
    "Pendulum-v1",
    "PointRobot-misc",
    "Reacher-misc",
    "Swimmer-misc",
]


@pytest.fixture(autouse=True)
def no_download(monkeypatch):
    """MNISTBandit downloads its images; here there is no network."""

    def refuse():
        raise urllib.error.URLError("no network")

    monkeypatch.setattr("gymnax.utils.load_mnist.load_mnist", refuse)


def rollout(env, num_steps=3, num_envs=2, action=0):
    """A scan of vmapped steps: (first obs [N, O], steps [T, N, ...])."""

    def step(carry, key):
        _, state = carry
        actions = jnp.full(num_envs, action, jnp.int32)
        if isinstance(env.actions, envs.Box):
            actions = jnp.full((num_envs, len(env.actions.low)), float(action))
        result = jax.vmap(env.step)(jax.random.split(key, num_envs), state, actions)
        return (result.obs, result.state), result

    first = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), num_envs))
    return first[0], jax.lax.scan(step, first, jax.random.split(jax.random.key(1), num_steps))[1]


@pytest.mark.parametrize("name", sorted(set(BUILTIN) - {"MNISTBandit-bsuite"}))
def test_every_environment_fits(name):
    env = envs.make(name)
    first, steps = jax.eval_shape(lambda: rollout(env))
    assert isinstance(env.actions, envs.Box) == (name in BOX_ACTIONS)
    assert (first.shape, first.dtype) == ((2, env.num_features), jnp.float32)
    for obs in (steps.obs, steps.final_obs):
        assert (obs.shape, obs.dtype) == ((3, 2, env.num_features), jnp.float32)
    assert (steps.reward.shape, steps.reward.dtype) == ((3, 2), jnp.float32)
    for flag in (steps.terminated, steps.truncated):
        assert (flag.shape, flag.dtype) == ((3, 2), jnp.bool_)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(BUILTIN) - {"MNISTBandit-bsuite"}))
def test_no_episode_is_truncated_before_its_time_limit(name):
    """And the next begins its count anew, so that truncations stand no closer than the limit."""
    _, params = envs._construct(name, {})
    limit = type(params.max_steps_in_episode)(3)
    env = envs.make(name, (("max_steps_in_episode", limit),))
    assert env.time_limit == 3
    _, steps = jax.jit(lambda: rollout(env, num_steps=12))()
    ended, since = np.asarray(steps.terminated | steps.truncated), np.zeros(2, int)
    for t in range(12):
        since += 1
        assert not (np.asarray(steps.truncated[t]) & (since < 3)).any()
        since[ended[t]] = 0
    assert ended.any()


@pytest.mark.parametrize(("name", "limit"), [("CartPole-v1", 500), ("FrozenLake-misc", 100), ("Counter-test", 1)])
def test_time_limits_are_known_of_gymnax_alone(name, limit):
    assert envs.make(name).time_limit == limit


@pytest.mark.parametrize("name", ["DiscountingChain-bsuite", "FrozenLake-misc", "SimpleBandit-bsuite", "MetaMaze-misc"])
def test_an_environment_first_made_inside_one_program_works_in_the_next(name):
    """Arrays that a constructor makes must not belong to the program that was being traced."""
    envs.make.cache_clear()
    shapes = [jax.eval_shape(jax.jit(lambda: rollout(envs.make(name))[1].reward)) for _ in range(2)]
    assert shapes[0] == shapes[1]
    envs.make.cache_clear()


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("Pendulum-v1", (-2.0,), (2.0,)),
        ("PointRobot-misc", (-0.1, -0.1), (0.1, 0.1)),
        ("Echo-test", (-1.0, 0.0), (1.0, 4.0)),
        ("UnboundedActions-test", (-np.inf, -np.inf), (np.inf, np.inf)),
    ],
)
def test_bounds_of_actions(name, low, high):
    actions = envs.make(name).actions
    np.testing.assert_allclose(actions.low, low, rtol=1e-6)
    np.testing.assert_allclose(actions.high, high, rtol=1e-6)


def test_missing_data_is_reported():
    with pytest.raises(ValueError, match=r"^config\.env = 'MNISTBandit-bsuite': its data could not .*no network.*$"):
        envs.make("MNISTBandit-bsuite")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("OtherSpaces-test", "its observations are .*; supported: Box, Discrete, a Dict or Tuple of them"),
        ("OtherActions-test", "its actions are Tuple.*; supported: Discrete, a Tuple of them, Box"),
        ("WrongMask-test", "its action mask has 2 entries; it must have 3"),
    ],
)
def test_unsupported_spaces_are_refused(name, reason):
    with pytest.raises(ValueError, match=rf"^config\.env = '{name}': {reason}$"):
        envs.make(name)


@pytest.mark.parametrize("name", ["Nested-test", "Vector-test"])
def test_observations_in_parts_are_flattened_and_actions_put_together(name):
    env = envs.make(name)
    assert (env.num_features, env.obs_shape, env.actions) == (8, (8,), envs.MultiDiscrete((2, 3)))
    obs, state = env.reset(jax.random.key(0))
    positive = int(state.sign > 0)
    np.testing.assert_array_equal(obs, [*np.eye(4)[3 * positive], state.sign, 7, *np.eye(2)[positive]])
    for action, reward in (([positive, 2], 2), ([1 - positive, 2], 1), ([1 - positive, 0], 0)):
        assert env.step(jax.random.key(1), state, jnp.array(action)).reward == reward


def test_an_action_mask_stands_at_the_end_of_an_observation():
    env = envs.make("Masked-test")
    assert (env.num_features, env.obs_shape, env.num_masked) == (4, (1,), 3)
    obs, state = env.reset(jax.random.key(0))
    np.testing.assert_array_equal(obs, [100 + state.sign, *([1, 1, 0] if state.sign > 0 else [0, 1, 1])])


def test_images_keep_their_shape_beside_the_flat_observation():
    assert envs.make("Breakout-MinAtar").obs_shape == (10, 10, 4)
    assert envs.make("Catch-bsuite").obs_shape == (10, 5)
    assert envs.make("FrozenLake-misc").obs_shape == (16,)


@pytest.mark.parametrize(
    ("name", "close"), [("CartPole", "CartPole-v1"), ("cartpole-v1", "CartPole-v1"), ("Breakout", "Breakout-MinAtar")]
)
def test_an_unknown_environment_lists_the_close_ones(name, close):
    with pytest.raises(ValueError, match=rf"^config\.env = '{name}': no such environment; close ones: .*{close}"):
        envs.make(name)


def test_an_environment_like_no_other_lists_all():
    with pytest.raises(ValueError, match=r"registered ones: .*CartPole-v1.*FrozenLake-misc"):
        envs.make("???")


def counter(**params):
    return rollout(envs.make("Counter-test", tuple(params.items())), num_steps=7)


def test_observations_and_final_observations_of_a_time_limit():
    first, steps = counter(max_steps_in_episode=3)
    # The final observation is the third; the next action sees the first of a new episode, with another start.
    np.testing.assert_array_equal(steps.final_obs[:, 0, 0], [1, 2, 3, 1, 2, 3, 1])
    np.testing.assert_array_equal(steps.obs[:, 0, 0], [1, 2, 0, 1, 2, 0, 1])
    np.testing.assert_array_equal(steps.final_obs[:3, :, 1], np.broadcast_to(first[:, 1], (3, 2)))
    assert (steps.obs[2, :, 1] != steps.final_obs[2, :, 1]).all()
    np.testing.assert_array_equal(steps.final_obs[3:6, :, 1], np.broadcast_to(steps.obs[2, :, 1], (3, 2)))


def test_a_time_limit_is_truncated_and_not_terminated():
    _, steps = counter(max_steps_in_episode=3)
    np.testing.assert_array_equal(steps.truncated[:, 0], [0, 0, 1, 0, 0, 1, 0])
    np.testing.assert_array_equal(steps.terminated[:, 0], np.zeros(7))


def test_a_terminal_is_terminated_and_not_truncated():
    _, steps = counter(terminal_step=3)
    np.testing.assert_array_equal(steps.terminated[:, 0], [0, 0, 1, 0, 0, 1, 0])
    np.testing.assert_array_equal(steps.truncated[:, 0], np.zeros(7))


def test_a_terminal_at_the_time_limit_sets_both_flags():
    _, steps = counter(terminal_step=3, max_steps_in_episode=3)
    np.testing.assert_array_equal(steps.terminated[:, 0], [0, 0, 1, 0, 0, 1, 0])
    np.testing.assert_array_equal(steps.truncated[:, 0], [0, 0, 1, 0, 0, 1, 0])


@pytest.mark.parametrize("reward_shape", [(), (1,), (1, 1)])
def test_integer_rewards_of_any_unit_shape_become_float32_scalars(reward_shape):
    _, steps = counter(reward_shape=reward_shape)
    assert (steps.reward.shape, steps.reward.dtype) == ((7, 2), jnp.float32)
    np.testing.assert_array_equal(steps.reward[:, 0], [1, 2, 3, 4, 5, 1, 2])


def test_a_reward_that_is_not_a_scalar_is_refused():
    env = envs.make("Counter-test", (("reward_shape", (2,)),))
    with pytest.raises((ValueError, TypeError)):
        jax.eval_shape(lambda: rollout(env))


def test_integer_observations_become_one_hot():
    env = envs.make("FrozenLake-misc", (("is_slippery", False),))
    first, steps = jax.jit(lambda: rollout(env, action=2))()
    assert env.num_features == 16
    np.testing.assert_array_equal(first, np.eye(16)[[0, 0]])
    np.testing.assert_array_equal(steps.obs[:, 0], np.eye(16)[[1, 2, 3]])


def test_boards_are_flattened():
    env = envs.make("Catch-bsuite")
    first, _ = jax.jit(lambda: rollout(env))()
    assert env.num_features == 50
    assert (env.actions.num_actions, first.sum()) == (3, 4)  # the ball and the paddle of two boards
    assert envs.make("Breakout-MinAtar").num_features == 10 * 10 * 4


def test_an_environment_parameter_is_overridden():
    env = envs.make("CartPole-v1", (("max_steps_in_episode", 2),))
    _, steps = jax.jit(lambda: rollout(env, num_steps=4))()
    np.testing.assert_array_equal(steps.truncated[:, 0], [0, 1, 0, 1])


def test_a_constructor_argument_is_given():
    assert envs.make("Catch-bsuite", (("rows", 4), ("columns", 3))).num_features == 12


@pytest.mark.parametrize("mapping_seed", [0, 3])
def test_the_mapping_seed_moves_the_best_arm(mapping_seed):
    env = envs.make("DiscountingChain-bsuite", (("mapping_seed", mapping_seed),))
    _, state = env.reset(jax.random.key(0))
    assert int(jnp.argmax(state.rewards)) == mapping_seed


def test_an_array_valued_parameter_is_given():
    env = envs.make("DiscountingChain-bsuite", (("reward_timestep", (1, 2, 3, 4, 5)),))
    _, steps = jax.jit(lambda: rollout(env, num_steps=5, action=1))()
    np.testing.assert_allclose(steps.reward[:, 0], [0, 1, 0, 0, 0])


def test_an_unknown_parameter_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"^config\.env_params\.gravitation: CartPole-v1 has no such.*gravity"):
        envs.make("CartPole-v1", (("gravitation", 1.0),))


@pytest.mark.parametrize("value", ["9.8", float("nan"), float("inf"), None])
def test_parameters_are_finite_numbers(value):
    with pytest.raises(ValueError, match=r"^config\.env_params\.gravity = .*: must be a finite number$"):
        envs.make("CartPole-v1", (("gravity", value),))


def test_an_invalid_constructor_argument_is_refused_in_one_line():
    with pytest.raises(ValueError, match=r"^config\.env.*map_name"):
        envs.make("FrozenLake-misc", (("map_name", "5x5"),))


def test_the_box_actions_here_are_all_there_are():
    boxes = []
    for name in BUILTIN:
        if name != "MNISTBandit-bsuite":
            env, params = gymnax.make(name)
            boxes += [name] * (not isinstance(env.action_space(params), spaces.Discrete))
    assert sorted(boxes) == sorted(BOX_ACTIONS)


def test_gymnax_is_imported_without_what_it_draws_with_and_draws_all_the_same():
    code = """
import sys
from purejaxppo.agent import envs
envs.make("CartPole-v1")
print(sorted({"pandas", "seaborn", "matplotlib.pyplot"} & set(sys.modules)))
import gymnax.environments.bsuite.catch as catch, gymnax.environments.misc.pong as pong
print(catch.plt.__name__, callable(catch.plt.subplots), callable(pong.sns.color_palette))
"""
    assert run_python(code, timeout=60).splitlines() == ["[]", "matplotlib.pyplot True True"]


FEW_TO_STEP = ["CartPole-v1", "Pendulum-v1", "Catch-bsuite", "DeepSea-bsuite", "Freeway-MinAtar"]


@pytest.mark.parametrize(
    "name",
    [
        *FEW_TO_STEP,
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in sorted(set(BUILTIN) - {*FEW_TO_STEP, "MNISTBandit-bsuite"})
        ),
    ],
)
def test_a_step_in_two_parts_is_the_step_of_gymnax(name):
    """With episodes of four steps, so that every fourth resets."""
    short = (("max_steps_in_episode", 4),)
    try:
        env, (gymnax_env, params) = envs.make(name, short), envs._construct(name, dict(short))
    except (TypeError, ValueError):
        env, (gymnax_env, params) = envs.make(name), envs._construct(name, {})
    unflatten = envs._actions(name, gymnax_env.action_space(params))[1]

    @jax.jit
    def both(key):
        actions = np.zeros(len(env.actions.low), np.float32) if isinstance(env.actions, envs.Box) else np.int32(0)

        def step(carry, key):
            ours, theirs = carry
            result = env.step(key, ours, actions)
            obs, theirs, reward, terminated, truncated, info = gymnax_env.step(key, theirs, unflatten(actions), params)
            del obs, info
            return (result.state, theirs), (
                (result.state, result.reward, result.terminated, result.truncated),
                (theirs, reward, terminated, truncated),
            )

        first_key, key = jax.random.split(key)
        (_, ours), (_, theirs) = env.reset(first_key), gymnax_env.reset(first_key, params)
        theirs = envs._strong(theirs)
        return jax.lax.scan(step, (ours, theirs), jax.random.split(key, 9))[1]

    ours, theirs = both(jax.random.key(3))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
