"""Sweeps: the same runs as `vmap` of `train`, over two devices, whatever the number of runs and segments."""

import functools
import importlib
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purejaxppo as ppo
from purejaxppo import devices as devices_module
from tests.helpers import assert_close, assert_equal, differs, leaves, run_python, tiny

sweep_module = importlib.import_module("purejaxppo.sweep")

INF = float("inf")
CONFIG = tiny(total_timesteps=3 * 16, num_epochs=1, num_minibatches=1)
GRID = ppo.grid(ppo.HParams(ent_coef=0.01), learning_rate=[0.01, 0.02])


@pytest.fixture(scope="module", autouse=True)
def fast_compilation():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices_module, "compiler_options", lambda mesh: {"xla_backend_optimization_level": "0"})
        yield


@pytest.fixture(scope="module")
def swept():
    """Two settings of three seeds, with what was reported on the way and the devices that the results were on."""
    reports, devices = [], set()
    compiled = sweep_module._compile

    def spy(*args):
        start, segments = compiled(*args)

        def watch(segment):
            def run(*args):
                state, metrics = segment(*args)
                devices.update(state.obs.sharding.device_set)
                return state, metrics

            return run

        return start, {length: watch(segment) for length, segment in segments.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep_module, "_compile", spy)
        result = ppo.sweep(CONFIG, GRID, num_seeds=3, seed=5, progress=lambda *args: reports.append(args))
    return result, reports, devices


@pytest.fixture(scope="module")
def reference():
    """(hparams, number of seeds) -> the same runs by `vmap` on one device."""
    one = functools.partial(ppo.train, CONFIG)
    train = jax.jit(jax.vmap(jax.vmap(one, (None, 0)), (0, None)))
    keys = jnp.stack([jax.random.fold_in(jax.random.key(5), j) for j in range(5)])
    state, metrics = train(GRID, keys)
    return lambda settings, seeds: jax.tree.map(lambda x: x[:settings, :seeds], (state, metrics))


# Grids


def test_a_grid_is_every_combination_the_last_axis_fastest():
    grid = ppo.grid(ppo.HParams(), clip_eps=[0.1, 0.2, INF], learning_rate=[3e-4, 1e-3])
    np.testing.assert_allclose(grid.clip_eps, [0.1, 0.1, 0.2, 0.2, INF, INF])
    np.testing.assert_allclose(grid.learning_rate, [3e-4, 1e-3, 3e-4, 1e-3, 3e-4, 1e-3])


def test_a_grid_keeps_the_other_fields():
    grid = ppo.grid(ppo.HParams(gamma=0.5), gae_lambda=[0.1, 0.2])
    for field, leaf in grid._asdict().items():
        assert (leaf.shape, leaf.dtype) == ((2,), jnp.float32), field
        if field != "gae_lambda":
            np.testing.assert_allclose(leaf, getattr(ppo.HParams(gamma=0.5), field), rtol=1e-6)


def test_a_grid_of_nothing_is_one_setting():
    assert {leaf.shape for leaf in ppo.grid(ppo.HParams())} == {(1,)}


def test_a_grid_takes_arrays():
    np.testing.assert_allclose(ppo.grid(ppo.HParams(), gamma=jnp.array([0.5, 0.9])).gamma, [0.5, 0.9])


def test_a_grid_refuses_unknown_names():
    with pytest.raises(ValueError, match=r"^hparams\.clip_epsilon: .*did you mean 'clip_eps'\?$"):
        ppo.grid(ppo.HParams(), clip_epsilon=[0.1])


@pytest.mark.parametrize("values", [[], 0.1, [[0.1]], None])
def test_a_grid_refuses_what_is_not_a_list_of_values(values):
    with pytest.raises(ValueError, match=r"^hparams\.gamma = .*: must be a list of at least one value$"):
        ppo.grid(ppo.HParams(), gamma=values)


# Refusals


@pytest.mark.parametrize("num_seeds", [0, -1, 1.5, True, "3", None])
def test_the_number_of_seeds_is_a_positive_integer(num_seeds):
    with pytest.raises(ValueError, match=r"^num_seeds = .*positive integer$"):
        ppo.sweep(CONFIG, GRID, num_seeds)


@pytest.mark.parametrize(
    ("hparams", "message"),
    [
        (GRID._replace(gamma=jnp.array([0.9, 2.0])), r"^hparams\.gamma = 2: must be in \[0, 1\]$"),
        (GRID._replace(gamma=jnp.array([0.9, 0.8, 0.7])), r"^hparams: leaves of shapes .*\(2,\), \(3,\).*one length$"),
        (ppo.HParams(gamma=jnp.ones((2, 2))), r"^hparams: leaves of shapes .*\(2, 2\).*one length$"),
        (ppo.HParams(target_kl=[0.1, 0.2]), r"^hparams\.target_kl = 0\.1: .*kl_early_stopping"),
    ],
)
def test_invalid_settings_are_refused_before_anything_is_compiled(hparams, message, monkeypatch):
    monkeypatch.setattr(sweep_module, "_compile", None)
    with pytest.raises(ValueError, match=message):
        ppo.sweep(CONFIG, hparams, 2)


def test_an_unknown_environment_is_refused():
    with pytest.raises(ValueError, match=r"^config\.env = 'CartPole': no such environment"):
        ppo.sweep(tiny(env="CartPole"), ppo.HParams(), 2)


# The runs


def test_a_sweep_equals_vmap_of_train_run_by_run(swept, reference):
    result, *_ = swept
    state, metrics = reference(2, 3)
    assert_close(result.metrics, metrics, rtol=1e-3, atol=1e-4)
    assert_close(result.state, state, rtol=1e-3, atol=1e-4)


def test_results_are_settings_by_seeds_by_updates(swept):
    result, *_ = swept
    for name, leaf in result.metrics._asdict().items():
        assert isinstance(leaf, np.ndarray), name
        assert leaf.shape == (2, 3, 3), name
    assert result.state.obs.shape == (2, 3, 2, 4)
    np.testing.assert_allclose(result.metrics.learning_rate[:, :, 0], [[0.01] * 3, [0.02] * 3], rtol=1e-6)
    np.testing.assert_allclose(result.hparams.learning_rate, [0.01, 0.02], rtol=1e-6)
    assert result.config == CONFIG


def test_settings_share_their_seeds(swept):
    result, *_ = swept
    keys = np.asarray(jax.random.key_data(result.state.key))
    np.testing.assert_array_equal(keys[0], keys[1])
    assert len(np.unique(keys[0], axis=0)) == 3
    # The settings differ in the learning rate alone: until the first step is taken all is the same.
    for name in ("episode_return", "num_episodes", "explained_variance"):
        values = getattr(result.metrics, name)
        np.testing.assert_array_equal(values[0, :, 0], values[1, :, 0], err_msg=name)
    assert differs(result.metrics.policy_loss[0, :, 2], result.metrics.policy_loss[1, :, 2])


def test_all_devices_are_used(swept):
    *_, devices = swept
    assert devices == set(jax.local_devices())
    assert len(devices) == 2


def test_progress_is_reported_to_the_end(swept):
    result, reports, _ = swept
    done = [updates for updates, _ in reports]
    assert done[-1] == CONFIG.num_updates
    assert done == sorted(set(done))
    lengths = np.diff([0, *done])
    for length, (_, metrics) in zip(lengths, reports, strict=True):
        assert {leaf.shape for leaf in metrics} == {(6, length)}
    together = np.concatenate([metrics.policy_loss for _, metrics in reports], axis=1)
    np.testing.assert_array_equal(together.reshape(2, 3, 3), result.metrics.policy_loss)


def test_steps_per_second_count_the_steps_of_all_runs(swept):
    result, *_ = swept
    assert result.run_seconds > 0
    assert result.compile_seconds > 0
    np.testing.assert_allclose(result.steps_per_second * result.run_seconds, 2 * 3 * 3 * 16)


@pytest.mark.parametrize(("num_runs", "cpu_width"), [(1, 8), (3, 8), (5, 2)])
def test_padding_reaches_no_result(num_runs, cpu_width, reference, monkeypatch):
    """One run on one device; three on two devices of two; five in blocks of two on two devices of four."""
    monkeypatch.setattr(sweep_module, "CPU_WIDTH", cpu_width)
    result = ppo.sweep(CONFIG, ppo.HParams(ent_coef=0.01, learning_rate=0.01), num_runs, seed=5)
    state, metrics = reference(1, num_runs)
    assert_close(result.metrics, metrics, rtol=1e-3, atol=1e-4)
    assert_close(result.state, state, rtol=1e-3, atol=1e-4)


def test_segments_of_unequal_length_are_the_same_runs(swept, monkeypatch):
    monkeypatch.setattr(sweep_module, "_segment_lengths", lambda num_updates: [2, 1])
    done = []
    result = ppo.sweep(CONFIG, GRID, num_seeds=3, seed=5, progress=lambda updates, _: done.append(updates))
    assert done == [2, 3]
    assert_equal(result.metrics, swept[0].metrics)
    assert_equal(result.state, swept[0].state)


@pytest.mark.parametrize("num_updates", [*range(1, 130), 976, 977, 1953, 9973, 100_003])
def test_segments_cover_a_run_with_at_most_two_programs(num_updates):
    lengths = sweep_module._segment_lengths(num_updates)
    assert sum(lengths) == num_updates
    assert min(lengths) >= 1
    assert len(set(lengths)) <= 2
    assert len(lengths) <= 120


@pytest.mark.parametrize(("num_runs", "num_devices"), [*itertools.product([1, 2, 3, 8, 16, 17, 33, 1000], [1, 2, 3])])
def test_the_layout_holds_every_run_in_full_blocks(num_runs, num_devices):
    class Mesh:
        size = num_devices
        devices = np.array(jax.local_devices()[:1])

    width, padded = devices_module.layout(num_runs, Mesh, sweep_module.CPU_WIDTH)
    assert padded >= num_runs
    assert padded % (width * num_devices) == 0
    assert 1 <= width <= sweep_module.CPU_WIDTH
    assert padded - num_runs < 2 * num_devices * sweep_module.CPU_WIDTH


CORES_PROGRAM = """
import jax, purejaxppo as ppo
ppo.use_all_cores()
print(len(jax.devices()))
try:
    ppo.use_all_cores()
    ppo.use_all_cores()
except RuntimeError:
    print("refused")
"""


def test_all_cores_can_be_asked_for_after_the_import_and_not_later():
    devices, *_ = run_python(CORES_PROGRAM, timeout=60).split()
    assert int(devices) == len(os.sched_getaffinity(0))


def test_the_numbers_of_a_sweep_are_those_of_its_state(swept):
    result, *_ = swept
    assert (np.asarray(result.state.update_index) == 3).all()
    assert all(np.isfinite(leaf).all() for leaf in leaves(result.state.params))
