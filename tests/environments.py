"""Environments small enough that every value is known.

The five probes, each needing one more part of the learner than the one before: a constant reward (the critic), a reward
that depends on the observation (the critic reads it), a delayed reward (the discount), a reward for an action (the
policy), a reward for an action that depends on the observation (the policy reads it). `Endless` tells a time limit from
a terminal, and `Counter` is scripted: it counts its own steps.
"""

from typing import ClassVar

import gymnax
import jax
import jax.numpy as jnp
from flax import struct
from gymnax.environments import environment, spaces


@struct.dataclass
class State(environment.EnvState):
    sign: jax.Array
    time: jax.Array


@struct.dataclass
class Params(environment.EnvParams):
    max_steps_in_episode: int = 1000


class Probe(environment.Environment):
    """Two actions; an episode of `length` steps; an observation that is a sign (drawn at the reset) or the time.

    Each probe defines its `reward(state, action)`.
    """

    length: ClassVar[int] = 1
    num_features: ClassVar[int] = 1

    @property
    def default_params(self) -> Params:
        return Params()

    def observation(self, state: State) -> jax.Array:
        return jnp.zeros(1)

    def reset_env(self, key, params):
        sign = jnp.where(jax.random.bernoulli(key), 1.0, -1.0)
        state = State(sign=sign, time=jnp.zeros((), jnp.int32))
        return self.observation(state), state

    def step_env(self, key, state, action, params):
        reward = self.reward(state, action)
        state = state.replace(time=state.time + 1)
        return self.observation(state), state, reward, state.time >= self.length, {}

    def action_space(self, params=None):
        return spaces.Discrete(2)

    def observation_space(self, params):
        return spaces.Box(-jnp.inf, jnp.inf, (self.num_features,))


class ConstantReward(Probe):
    """Reward 1, at once: the value is 1."""

    def reward(self, state, action):
        return jnp.ones(())


class ObservationReward(Probe):
    """The reward is the observation, 1 or -1, and so is the value."""

    def reward(self, state, action):
        return state.sign

    def observation(self, state):
        return state.sign[None]


class DelayedReward(Probe):
    """Reward 0 and then 1: the first value is gamma, the second 1."""

    length = 2

    def reward(self, state, action):
        return jnp.where(state.time == 1, 1.0, 0.0)

    def observation(self, state):
        return jnp.asarray(state.time, jnp.float32)[None]


class ActionReward(Probe):
    """Reward 1 for action 1 and -1 for action 0."""

    def reward(self, state, action):
        return jnp.where(action == 1, 1.0, -1.0)


class ObservationActionReward(Probe):
    """Reward 1 for the action that the observation asks for (1 for 1, 0 for -1), else -1."""

    def reward(self, state, action):
        return jnp.where(action == (state.sign > 0), 1.0, -1.0)

    def observation(self, state):
        return state.sign[None]


class Endless(Probe):
    """Reward 1 for ever, cut by a time limit after five steps: the value is 1 / (1 - gamma)."""

    length = 1_000_000_000

    @property
    def default_params(self) -> Params:
        return Params(max_steps_in_episode=5)

    def reward(self, state, action):
        return jnp.ones(())


@struct.dataclass
class CounterState(environment.EnvState):
    start: jax.Array
    time: jax.Array


@struct.dataclass
class CounterParams(environment.EnvParams):
    terminal_step: int = 1000
    max_steps_in_episode: int = 5


class Counter(environment.Environment):
    """Counts: the observation is (steps done, a number drawn at the reset), the t-th step earns t.

    It terminates at `terminal_step` and is truncated at `max_steps_in_episode`. The reward is an integer of shape
    `reward_shape`.
    """

    def __init__(self, reward_shape=()):
        self.reward_shape = reward_shape

    @property
    def default_params(self) -> CounterParams:
        return CounterParams()

    def reset_env(self, key, params):
        state = CounterState(start=jax.random.uniform(key), time=0)
        return self.observation(state), state

    def step_env(self, key, state, action, params):
        state = state.replace(time=state.time + 1)
        reward = jnp.asarray(state.time, jnp.int32).reshape(self.reward_shape)
        return self.observation(state), state, reward, state.time >= params.terminal_step, {}

    def observation(self, state):
        return jnp.stack([jnp.asarray(state.time, jnp.float32), state.start])

    def action_space(self, params=None):
        return spaces.Discrete(2)

    def observation_space(self, params):
        return spaces.Box(-jnp.inf, jnp.inf, (2,))


@struct.dataclass
class EchoState(environment.EnvState):
    seen: jax.Array
    time: jax.Array


class Echo(Probe):
    """Shows the action that it was given, two numbers in [-1, 1] and [0, 4], and rewards nearness to (0.5, 1).

    It never ends, and is cut after five steps.
    """

    target: ClassVar = (0.5, 1.0)

    @property
    def default_params(self) -> Params:
        return Params(max_steps_in_episode=5)

    def reset_env(self, key, params):
        state = EchoState(seen=jnp.zeros(2), time=jnp.zeros((), jnp.int32))
        return state.seen, state

    def step_env(self, key, state, action, params):
        reward = -jnp.sum((action - jnp.array(self.target)) ** 2)
        state = EchoState(seen=action, time=state.time + 1)
        return state.seen, state, reward, jnp.zeros((), bool), {}

    def action_space(self, params=None):
        return spaces.Box(jnp.array([-1.0, 0.0]), jnp.array([1.0, 4.0]), (2,))

    def observation_space(self, params):
        return spaces.Box(-jnp.inf, jnp.inf, (2,))


class UnboundedActions(Echo):
    """Its actions have no bounds, one said by an infinity and one by the largest float32."""

    def action_space(self, params=None):
        return spaces.Box(-jnp.inf, jnp.finfo(jnp.float32).max, (2,))


class Drift(Probe):
    """Observations far from 0: one about 5, drawn at the reset, and 10,000 + the steps done. Rewards 1, 2, 3."""

    length = 3
    num_features = 2

    def reset_env(self, key, params):
        state = State(sign=jax.random.normal(key), time=jnp.zeros((), jnp.int32))
        return self.observation(state), state

    def observation(self, state):
        return jnp.stack([5.0 + 2.0 * state.sign, 10_000.0 + jnp.float32(state.time)])

    def reward(self, state, action):
        return jnp.float32(state.time + 1)


class Nested(Probe):
    """Observations in parts, one of which is in parts again, and two actions at once, of two and of three.

    Reward 1 for each right one: 1 for a positive sign and 0 for a negative one; always 2.
    """

    def observation(self, state):
        positive = jnp.int32(state.sign > 0)
        return (3 * positive, {"values": jnp.stack([state.sign, 7.0]), "positive": positive})

    def reward(self, state, action):
        first, second = action
        return jnp.where(first == (state.sign > 0), 1.0, 0.0) + jnp.where(second == 2, 1.0, 0.0)

    def action_space(self, params=None):
        return spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)])

    def observation_space(self, params):
        box = spaces.Box(-jnp.inf, jnp.inf, (2,))
        return spaces.Tuple([spaces.Discrete(4), spaces.Dict({"values": box, "positive": spaces.Discrete(2)})])


class Vector(Nested):
    """As `Nested`, with its actions as one array."""

    def action_space(self, params=None):
        space = spaces.Space()
        space.nvec = [2, 3]
        return space


class Masked(Probe):
    """Three actions of reward 0, 1 and 2; with a positive sign the last is forbidden, with a negative one the first.

    A forbidden action earns -100. The observation is a dictionary with the sign and the mask, which comes first.
    """

    mask_length = 3

    def observation(self, state):
        mask = jnp.where(state.sign > 0, jnp.array([1, 1, 0]), jnp.array([0, 1, 1]))
        return {"action_mask": mask, "sign": 100.0 + state.sign[None]}

    def reward(self, state, action):
        forbidden = action == jnp.where(state.sign > 0, 2, 0)
        return jnp.where(forbidden, -100.0, jnp.float32(action))

    def action_space(self, params=None):
        return spaces.Discrete(3)

    def observation_space(self, params):
        mask = spaces.Box(0, 1, (self.mask_length,), jnp.int32)
        return spaces.Dict({"action_mask": mask, "sign": spaces.Box(-jnp.inf, jnp.inf, (1,))})


class WrongMask(Masked):
    """Says nothing about its last action."""

    mask_length = 2


class OtherSpaces(Probe):
    """Its observation space is one that is not supported."""

    def observation_space(self, params):
        return spaces.Space()


class OtherActions(Probe):
    """Its action space is one that is not supported."""

    def action_space(self, params=None):
        return spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1, (1,))])


def register() -> None:
    """Makes them known to gymnax as `<class>-test`."""
    classes = [ConstantReward, ObservationReward, DelayedReward, ActionReward, ObservationActionReward]
    structured = [Nested, Vector, Masked, WrongMask, OtherSpaces, OtherActions]
    for cls in [*classes, *structured, Endless, Counter, Echo, UnboundedActions, Drift]:
        gymnax.register(f"{cls.__name__}-test", cls)
