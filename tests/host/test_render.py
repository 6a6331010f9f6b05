"""Moving pictures of trained policies."""

import itertools
import sys

import jax
import numpy as np
import pytest

import purejaxppo as ppo
from purejaxppo.agent import envs
from purejaxppo.host import render
from purejaxppo.host.checkpoints import flatten
from tests.helpers import tiny

Image = pytest.importorskip("PIL.Image")


def policy(name, **env_params):
    config = tiny(env=name, env_params=env_params, hidden_sizes=(4,))
    state = jax.eval_shape(lambda: ppo.init(config, ppo.HParams(), jax.random.key(0)))
    rng = np.random.default_rng(0)
    leaves = {name: rng.normal(size=leaf.shape).astype(np.float32) for name, leaf in flatten(state).items()
              if name.startswith("params/")}  # fmt: skip
    return ppo.Policy(config, envs.spaces_of(config.env, config.env_params), leaves)


@pytest.fixture(scope="module")
def catch():
    return policy("Catch-bsuite", rows=5)


def test_a_picture_has_a_frame_a_step_and_every_frame_differs(catch, tmp_path):
    returns = render.render(catch, tmp_path / "out.gif", num_episodes=2)
    with Image.open(tmp_path / "out.gif") as picture:
        frames = []
        for index in range(picture.n_frames):
            picture.seek(index)
            frames.append(np.asarray(picture.convert("RGB")))
    assert len(frames) == 2 * 4, "the ball of five rows falls four times"
    assert all((a != b).any() for a, b in itertools.pairwise(frames))
    assert set(returns) <= {-1.0, 1.0}
    assert [path.name for path in tmp_path.iterdir()] == ["out.gif"]


def test_episodes_are_those_of_the_policy(catch):
    states, returns = render.episodes(catch, 3, seed=1)
    assert len(states) == sum(map(len, returns)) == 12
    balls = [int(state.ball_y) for state in states]
    assert balls == [0, 1, 2, 3] * 3
    again, _ = render.episodes(catch, 3, seed=1)
    assert all(jax.tree.all(jax.tree.map(np.array_equal, a, b)) for a, b in zip(states, again, strict=True))
    other, _ = render.episodes(catch, 3, seed=2)
    assert any(a.ball_x != b.ball_x for a, b in zip(states, other, strict=True))
    env = envs.make(catch.config.env, catch.config.env_params)
    for before, after in itertools.pairwise(states):
        if after.ball_y:
            obs = np.zeros((5, 5), np.float32)
            obs[before.paddle_y, before.paddle_x] = obs[before.ball_y, before.ball_x] = 1
            moved = env.step(jax.random.key(0), before, catch(obs)).state
            assert moved.paddle_x == after.paddle_x


def test_an_environment_that_cannot_be_drawn_is_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"^UmbrellaChain-bsuite: gymnax has no visualiser for this environment$"):
        render.render(policy("UmbrellaChain-bsuite"), tmp_path / "out.gif")
    assert list(tmp_path.iterdir()) == []


def test_a_visualiser_that_is_not_installed_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(ValueError, match=r"^CartPole-v1: .*pip install 'purejaxppo\[render\]'$"):
        render.render(policy("CartPole-v1"), tmp_path / "out.gif")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("out.mp4", r"out\.mp4: must end in \.gif$"),
        ("none/out.gif", r"cannot be written to \(there is no such directory"),
    ],
)
def test_a_path_that_is_no_place_for_a_gif_is_refused(path, message, catch, tmp_path):
    with pytest.raises(ValueError, match=message):
        render.render(catch, tmp_path / path)


def test_endless_episodes_are_refused(catch, tmp_path, monkeypatch):
    monkeypatch.setattr(render, "FRAMES", 6)
    with pytest.raises(ValueError, match=r"^num_episodes = 2: more than 6 frames"):
        render.render(catch, tmp_path / "out.gif", num_episodes=2)
