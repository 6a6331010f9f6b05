"""Episodes of a trained policy as a moving picture, by gymnax's own visualiser."""

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from purejaxppo.agent import envs
from purejaxppo.config import check_size
from purejaxppo.host.policy import Policy

FRAMES = 5000  # a visualiser draws a few dozen a second
HEADLESS = {"SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy", "PYGAME_HIDE_SUPPORT_PROMPT": "1"}


def render(policy: Policy, path: Path, num_episodes: int = 1, seed: int = 0) -> np.ndarray:
    """Draws episodes of the policy's most likely actions, one after another, into a GIF.

    Args:
      policy: of an environment that gymnax can draw.
      path: of the GIF.
      num_episodes: how many.
      seed: chooses the episodes.

    Returns:
      The return of each episode, [num_episodes] float64.

    Raises:
      ValueError: for an environment that has no visualiser, what it needs and is not installed, or a path that is not
        of a GIF or cannot be written to.
    """
    check_size("num_episodes", num_episodes)
    check_size("seed", seed, lowest=0)
    if path.suffix.lower() != ".gif":
        raise ValueError(f"{path}: must end in .gif")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: cannot be written to (there is no such directory)")
    for variable, value in HEADLESS.items():
        os.environ.setdefault(variable, value)
    name, env_params = policy.config.env, policy.config.env_params
    states, returns = episodes(policy, num_episodes, seed)
    picture = envs.visualizer(name, env_params, states, np.concatenate(returns))
    partial = path.with_name(f".partial-{path.name}")
    try:
        picture.animate(str(partial))
        partial.replace(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written to ({error.strerror or error})") from None
    finally:
        partial.unlink(missing_ok=True)
    return np.array([episode[-1] for episode in returns])


def episodes(policy: Policy, num_episodes: int, seed: int) -> tuple[list[Any], list[np.ndarray]]:
    """The environment's states before each step, of all episodes; and of each episode, its return up to each step."""
    env = envs.make(policy.config.env, policy.config.env_params)

    def move(key: jax.Array, state: Any, obs: jax.Array, memory: Any) -> tuple[envs.EnvStep, Any]:
        action, memory = policy.step(obs, memory)
        return env.step(key, state, action), memory

    reset, step = jax.jit(env.reset), jax.jit(move)
    key = jax.random.key(seed)
    obs, state = reset(jax.random.fold_in(key, 0))
    states: list[Any] = []
    returns: list[np.ndarray] = []
    while len(returns) < num_episodes:
        rewards: list[float] = []
        done, memory = False, policy.first_memory()
        while not done:
            if len(states) == FRAMES:
                raise ValueError(f"num_episodes = {num_episodes}: more than {FRAMES:,} frames; choose fewer")
            states.append(jax.device_get(state))
            result, memory = step(jax.random.fold_in(key, len(states)), state, obs, memory)
            state, obs = result.state, result.obs
            rewards.append(float(result.reward))
            done = bool(result.terminated | result.truncated)
        returns.append(np.cumsum(rewards))
    return states, returns
