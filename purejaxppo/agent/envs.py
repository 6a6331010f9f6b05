"""Environments. The only file that knows gymnax.

`make` turns a name into an `Env`: pure functions with flat float32 observations, scalar float32 rewards, the two kinds
of episode end apart, and the final observation of an episode before the automatic reset replaces it.

Importing gymnax makes arrays, which starts JAX and fixes its devices; it is imported on first use instead, so that
`devices.use_all_cores` can be called after `import purejaxppo`.
"""

import dataclasses
import difflib
import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

MASK = "action_mask"  # the entry of a dictionary of observations that says which actions are allowed
DRAWING = ("seaborn", "matplotlib", "matplotlib.pyplot", "matplotlib.colors")  # what gymnax's environments import
MAX_PREPARED = 64  # numbers that a step may bring along of where it would reset to
UNBOUNDED = 1e30  # spaces say "no bound" by an infinity or by the largest float32


class EnvStep(NamedTuple):
    """One step of one environment."""

    obs: jax.Array  # [O] float32, to act on next: the first of a new episode where this one ended
    state: Any
    reward: jax.Array  # () float32
    terminated: jax.Array  # () bool, the environment ended the episode
    truncated: jax.Array  # () bool, the time limit was reached
    final_obs: jax.Array  # [O] float32, of the true successor, before any reset


class Discrete(NamedTuple):
    """One action of `num_actions`, () int32."""

    num_actions: int


class MultiDiscrete(NamedTuple):
    """D choices at once, one of `sizes[d]` each, [D] int32."""

    sizes: tuple[int, ...]


class Box(NamedTuple):
    """D real numbers between bounds (infinite where there are none), [D] float32."""

    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Env:
    """An environment: its sizes, and `reset` and `step` for one copy of it (vmap them for more).

    A step has two parts, so that a rollout can do the first for all of its steps at once, before its loop.

    Attributes:
      name: as registered.
      num_features: O, the length of a flattened observation.
      obs_shape: its shape before it was flattened, without the mask; (O,) where it had none.
      num_masked: entries at its end that say which actions are allowed (1) and which are not (0); 0 without a mask.
      actions: what `step` takes.
      time_limit: an episode is truncated after so many steps and no fewer; 1 where that is not known.
      reset: key -> (obs [O], state).
      prepare: key -> what depends on nothing else in a step: where it would reset to, unless that is large.
      advance: (prepared, state, action) -> EnvStep; resets by itself at an episode's end.
    """

    name: str
    num_features: int
    obs_shape: tuple[int, ...]
    num_masked: int
    actions: Discrete | MultiDiscrete | Box
    time_limit: int
    reset: Callable[[jax.Array], tuple[jax.Array, Any]]
    prepare: Callable[[jax.Array], Any]
    advance: Callable[[Any, Any, jax.Array], EnvStep]

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> EnvStep:
        """One step."""
        return self.advance(self.prepare(key), state, action)


@functools.cache
def make(name: str, env_params: tuple[tuple[str, Any], ...] = ()) -> Env:
    """The environment of that name with the given parameters overridden.

    Args:
      name: any environment that gymnax registers, `gymnax.register` included.
      env_params: (name, value) pairs; parameters of the environment or arguments of its constructor.

    Raises:
      ValueError: for an unknown environment (with the close ones), an unknown or invalid parameter, a space that is
        not supported, or an environment whose data cannot be loaded.
    """
    # The first call may come from within a program that is being traced: what is built here must not belong to it.
    with jax.ensure_compile_time_eval():
        env, params = _construct(name, dict(env_params))
        actions, unflatten = _actions(name, env.action_space(params))
        features, mask = _without_mask(name, env.observation_space(params), actions)
        flatten_features = _flattener(name, features)

    def flatten(obs: Any) -> jax.Array:
        if not mask:
            return flatten_features(obs)
        allowed = jnp.asarray(_entry(obs, MASK), jnp.float32).reshape(mask)
        return jnp.concatenate([flatten_features(obs), allowed])

    def reset(key: jax.Array) -> tuple[jax.Array, Any]:
        obs, state = env.reset(key, params)
        return flatten(obs), _strong(state)

    def told(obs: Any, state: Any, reward: Any, terminated: Any, truncated: Any, final_obs: Any) -> EnvStep:
        return EnvStep(
            obs=flatten(obs),
            state=_strong(state),
            reward=jnp.asarray(reward, jnp.float32).reshape(()),
            terminated=jnp.asarray(terminated, bool).reshape(()),
            truncated=jnp.asarray(truncated, bool).reshape(()),
            final_obs=flatten(final_obs),
        )

    def whole_step(key: jax.Array, state: Any, action: jax.Array) -> EnvStep:
        obs, state, reward, terminated, truncated, info = env.step(key, state, unflatten(action), params)
        return told(obs, state, reward, terminated, truncated, info["final_observation"])

    def draw_first(key: jax.Array) -> Any:
        step_key, reset_key = jax.random.split(key)
        return step_key, env.reset_env(reset_key, params)

    def step_to_first(prepared: Any, state: Any, action: jax.Array) -> EnvStep:
        step_key, first = prepared
        obs, state, reward, terminated, _ = env.step_env(step_key, state, unflatten(action), params)
        truncated = env.is_truncated(state, params)
        ended = terminated | truncated
        next_obs, next_state = jax.tree.map(functools.partial(jax.lax.select, ended), first, (obs, state))
        return told(next_obs, next_state, reward, terminated, truncated, obs)

    first_obs, first_state = jax.eval_shape(lambda: reset(jax.random.key(0)))
    num_features = first_obs.shape[0]
    size = sum(leaf.size for leaf in jax.tree.leaves((first_obs, first_state)))
    in_parts = size <= MAX_PREPARED and _steps_as_gymnax_does(env)
    return Env(
        name=name,
        num_features=num_features,
        obs_shape=_shape(features) or (num_features - mask,),
        num_masked=mask,
        actions=actions,
        time_limit=_time_limit(env, params),
        reset=reset,
        prepare=draw_first if in_parts else lambda key: key,
        advance=step_to_first if in_parts else whole_step,
    )


def _steps_as_gymnax_does(env: Any) -> bool:
    """Whether a step is `step_env` and, where an episode ended, `reset_env`: not if the environment's own differs."""
    from gymnax.environments.environment import Environment

    return isinstance(env, Environment) and type(env).step is Environment.step


def _time_limit(env: Any, params: Any) -> int:
    """The `time_limit` of an environment of gymnax's own, which all count their steps; of others nothing is known."""
    return max(1, int(params.max_steps_in_episode)) if _is_of_gymnax(env) else 1


def _is_of_gymnax(env: Any) -> bool:
    return type(env).__module__.split(".")[0] == "gymnax"


class _Deferred(types.ModuleType):
    """A module that is loaded when something of it is first used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by what imports it
            raise AttributeError(name)
        part = sys.modules.get(f"{self.__name__}.{name}")
        return getattr(importlib.import_module(self.__name__), name) if part is None else part


def comes_with_gymnax(name: str, env_params: tuple[tuple[str, Any], ...] = ()) -> bool:
    """Whether gymnax's version says what the environment does, as it does not of one that a user registered."""
    env, _ = _construct(name, dict(env_params))
    return _is_of_gymnax(env)


def _import_gymnax() -> Any:
    """gymnax, without the second that it would spend on loading what its environments draw themselves with."""
    deferred = {name: _Deferred(name) for name in DRAWING if name not in sys.modules}
    sys.modules |= deferred
    try:
        return importlib.import_module("gymnax")
    finally:
        for name in deferred:
            del sys.modules[name]


def _construct(name: str, overrides: dict[str, Any]) -> tuple[Any, Any]:
    """The gymnax environment and its parameters, each override given to the one that knows it."""
    gymnax = _import_gymnax()
    from gymnax.registration import _registry as factories

    if name not in gymnax.registered_envs:
        close = difflib.get_close_matches(name, gymnax.registered_envs, n=3, cutoff=0.4)
        listed = "close ones" if close else "registered ones"
        raise ValueError(
            f"config.env = {name!r}: no such environment; {listed}: {', '.join(close or gymnax.registered_envs)}"
        )
    arguments = {key: overrides[key] for key in inspect.signature(factories[name]).parameters if key in overrides}
    try:
        env, params = gymnax.make(name, **arguments)
    except OSError as error:
        raise ValueError(f"config.env = {name!r}: its data could not be loaded ({error})") from None
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"config.env_params = {arguments}: refused by {name} ({error})") from None
    defaults = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    changed = {}
    for key in overrides.keys() - arguments.keys():
        if key not in defaults:
            known = ", ".join(sorted(defaults))
            raise ValueError(f"config.env_params.{key}: {name} has no such parameter; it has {known}")
        changed[key] = _like(defaults[key], overrides[key], f"config.env_params.{key} = {overrides[key]!r}")
    return env, params.replace(**changed)


def _like(default: Any, value: Any, what: str) -> Any:
    """The value as the kind of number, or array of the shape, that the default is."""
    array = np.asarray(value)
    if (not np.issubdtype(array.dtype, np.number) and array.dtype != bool) or not np.isfinite(array).all():
        raise ValueError(f"{what}: must be a finite number")
    if array.shape != np.shape(default):
        raise ValueError(f"{what}: must have shape {np.shape(default)}")
    return jnp.asarray(value, jnp.result_type(default)) if array.ndim else value


def _actions(name: str, space: Any) -> tuple[Discrete | MultiDiscrete | Box, Callable[[jax.Array], Any]]:
    """What `step` takes for this action space, and how it becomes what the environment takes."""
    from gymnax.environments import spaces

    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n)), lambda action: action
    if isinstance(space, spaces.Tuple) and all(isinstance(part, spaces.Discrete) for part in space.spaces):
        return MultiDiscrete(tuple(int(part.n) for part in space.spaces)), tuple
    if hasattr(space, "nvec"):
        return MultiDiscrete(tuple(np.ravel(space.nvec).tolist())), lambda action: action
    if isinstance(space, spaces.Box):
        bounds = (np.broadcast_to(np.asarray(bound, np.float64), space.shape) for bound in (space.low, space.high))
        low, high = (np.where(np.abs(bound) < UNBOUNDED, bound, np.copysign(np.inf, bound)) for bound in bounds)
        if not (low < high).all():
            raise ValueError(f"config.env = {name!r}: its actions are {space!r}; each low must be below its high")
        shape = space.shape
        return Box(tuple(low.ravel().tolist()), tuple(high.ravel().tolist())), lambda action: action.reshape(shape)
    raise ValueError(f"config.env = {name!r}: its actions are {space!r}; supported: Discrete, a Tuple of them, Box")


def _without_mask(name: str, space: Any, actions: Discrete | MultiDiscrete | Box) -> tuple[Any, int]:
    """The observation space without its action mask, and the length of that, 0 where there is none.

    A mask is the entry "action_mask" of a dictionary: one number an action, of every component in turn.
    """
    from gymnax.environments import spaces

    if not isinstance(space, spaces.Dict) or MASK not in space.spaces or isinstance(actions, Box):
        return space, 0
    length = int(np.prod(space.spaces[MASK].shape))
    needed = actions.num_actions if isinstance(actions, Discrete) else sum(actions.sizes)
    if length != needed:
        raise ValueError(f"config.env = {name!r}: its action mask has {length} entries; it must have {needed}")
    return spaces.Dict({key: part for key, part in space.spaces.items() if key != MASK}), length


def _flattener(name: str, space: Any) -> Callable[[Any], jax.Array]:
    """How an observation of this space becomes a vector: integers from a set one-hot, everything else raveled."""
    from gymnax.environments import spaces

    if isinstance(space, spaces.Discrete):
        return lambda obs: jax.nn.one_hot(obs, space.n, dtype=jnp.float32)
    if isinstance(space, spaces.Box):
        return lambda obs: jnp.asarray(obs, jnp.float32).reshape(-1)
    if isinstance(space, spaces.Tuple | spaces.Dict):
        named = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        parts = [(key, _flattener(name, part)) for key, part in named]
        return lambda obs: jnp.concatenate([flatten(_entry(obs, key)) for key, flatten in parts])
    raise ValueError(
        f"config.env = {name!r}: its observations are {space!r}; supported: Box, Discrete, a Dict or Tuple of them"
    )


def _entry(obs: Any, key: Any) -> Any:
    """One part of an observation: of a tuple, a dictionary or an object."""
    return obs[key] if isinstance(obs, Mapping | tuple | list) else getattr(obs, key)


def _shape(space: Any) -> tuple[int, ...]:
    """The shape of an observation that is one array, () of any other."""
    parts = getattr(space, "spaces", None)
    if parts is None:
        return tuple(space.shape)
    return _shape(next(iter(parts.values()))) if isinstance(parts, Mapping) and len(parts) == 1 else ()


def _strong(state: Any) -> Any:
    """Without weak types: a scan carry must keep its types, and `time=0` is weakly typed until the first step."""
    return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, jnp.asarray(leaf).dtype), state)


def visualizer(name: str, env_params: tuple[tuple[str, Any], ...], states: list[Any], returns: np.ndarray) -> Any:
    """gymnax's own visualiser of a sequence of states; its `animate(path)` draws them.

    Args:
      name, env_params: as of `make`.
      states: of the environment, one a frame.
      returns: [frames], what had been collected by then.

    Raises:
      ValueError: for an environment that gymnax cannot draw, or draws with what is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")  # draws into files and needs no screen
    from gymnasium.error import DependencyNotInstalled
    from gymnax.visualize import Visualizer

    env, params = _construct(name, dict(env_params))
    drawn = Visualizer(env, params, states, returns)
    try:
        drawn.init()
    except DependencyNotInstalled:
        raise ValueError(f"{name}: its visualiser is not installed; pip install 'purejaxppo[render]'") from None
    if not hasattr(drawn, "im"):
        raise ValueError(f"{name}: gymnax has no visualiser for this environment")
    return drawn


class Spaces(NamedTuple):
    """What a policy must know of its environment when the environment is not there; see `Env` for the rest."""

    name: str
    num_features: int
    obs_shape: tuple[int, ...]
    num_masked: int
    num_values: int  # of an observation that is one integer of a set; 0 for others
    actions: Discrete | MultiDiscrete | Box


def spaces_of(name: str, env_params: tuple[tuple[str, Any], ...] = ()) -> Spaces:
    """The spaces of that environment.

    Args and Raises: as `make`.
    """
    adapted = make(name, env_params)
    env, params = _construct(name, dict(env_params))
    num_values = int(getattr(env.observation_space(params), "n", 0))
    return Spaces(name, adapted.num_features, adapted.obs_shape, adapted.num_masked, num_values, adapted.actions)


def spaces_to_mapping(spaces: Spaces) -> dict[str, Any]:
    """Spaces as JSON can hold them."""
    return spaces._asdict() | {"actions": {type(spaces.actions).__name__: spaces.actions._asdict()}}


def spaces_from_mapping(values: dict[str, Any]) -> Spaces:
    """The spaces of `spaces_to_mapping`, after JSON.

    Raises:
      KeyError, TypeError or ValueError: for what are none.
    """
    ((kind, fields),) = values["actions"].items()
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    actions = {"Discrete": Discrete, "MultiDiscrete": MultiDiscrete, "Box": Box}[kind](**fields)
    return Spaces(**values | {"actions": actions, "obs_shape": tuple(values["obs_shape"])})


def flatten(spaces: Spaces, obs: jax.Array) -> jax.Array:
    """One observation, or any batch of them, as the environment shows it or flattened already, as [..., O] float32.

    Raises:
      ValueError: for another shape.
    """
    if spaces.num_values and jnp.issubdtype(obs.dtype, jnp.integer):
        return jax.nn.one_hot(obs, spaces.num_values, dtype=jnp.float32)
    batch = obs.ndim - len(spaces.obs_shape)
    if not spaces.num_masked and batch >= 0 and obs.shape[batch:] == spaces.obs_shape:
        return obs.astype(jnp.float32).reshape(*obs.shape[:batch], spaces.num_features)
    if obs.shape[-1:] == (spaces.num_features,):
        return obs.astype(jnp.float32)
    shapes = dict.fromkeys(
        [(spaces.num_features,)] if spaces.num_masked else [spaces.obs_shape, (spaces.num_features,)]
    )
    shown = [f"integers below {spaces.num_values}"] * bool(spaces.num_values) + [
        f"of shape {shape}" for shape in shapes
    ]
    raise ValueError(
        f"obs of shape {obs.shape} and type {obs.dtype}: those of {spaces.name} are {' or '.join(shown)}, "
        "behind any batch axes"
    )
