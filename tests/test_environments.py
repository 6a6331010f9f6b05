"""Two updates of every environment that gymnax registers, with the networks and the bounds that suit it."""

import functools

import gymnax
import jax
import numpy as np
import pytest

import purejaxppo as ppo
from purejaxppo.agent import envs
from tests.helpers import tiny

BUILTIN = [name for name in gymnax.registered_envs if not name.endswith("-test")]


@pytest.fixture(autouse=True)
def few_images(monkeypatch):
    """Sixteen images of noise, instead of a download."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 128, (16, 28, 28)).astype(np.int8), (np.arange(16) % 10).astype(np.uint8)
    monkeypatch.setattr("gymnax.utils.load_mnist.load_mnist", lambda: ((images, labels), (images, labels)))
    envs.make.cache_clear()
    yield
    envs.make.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILTIN)
def test_every_environment_runs(name):
    """With normalisation, and as an image, squashed or with a memory, whichever fits."""
    env = envs.make(name)
    image = len(env.obs_shape) > 1 and min(env.obs_shape[:2]) >= 3
    network = "cnn" if image else "gru" if name in ("MemoryChain-bsuite", "MetaMaze-misc", "PointRobot-misc") else "mlp"
    config = tiny(
        env=name,
        network=network,
        squash=isinstance(env.actions, envs.Box),
        normalize_observations=True,
        normalize_rewards=True,
        total_timesteps=2 * 16,
    )
    state, metrics = jax.jit(functools.partial(ppo.train, config))(ppo.HParams(), jax.random.key(0))
    assert metrics.all_finite.all()
    assert state.obs_stats.count == 1 + 2 * 16
    assert np.isfinite(metrics.entropy).all()
