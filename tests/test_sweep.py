"""The engine of sweeps: the same runs as `vmap` of `train`, in whatever chunks and over however many devices."""

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
from purejaxppo import plan as plan_module
from purejaxppo import segments
from purejaxppo.host import programs
from tests.helpers import assert_close, assert_equal, differs, leaves, run_python, tiny

engine = importlib.import_module("purejaxppo.sweep")

INF = float("inf")
CONFIG = tiny(total_timesteps=3 * 16, num_epochs=1, num_minibatches=1)
GRID = ppo.grid(ppo.HParams(ent_coef=0.01), learning_rate=[0.01, 0.02])


@pytest.fixture(scope="module", autouse=True)
def fast_compilation():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices_module, "compiler_options", lambda mesh: {"xla_backend_optimization_level": "0"})
        yield
    programs.compile_group.cache_clear()


@pytest.fixture(scope="module")
def swept():
    """Two settings of three seeds, with what was reported on the way: after each update."""
    reports = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "SEGMENT_SECONDS", 0.0)
        result = ppo.sweep(CONFIG, GRID, num_seeds=3, seed=5, keep_state=True, progress=reports.append)
    return result, reports


@pytest.fixture(scope="module")
def reference():
    """(number of settings, number of seeds) -> the same runs by `vmap` on one device."""
    one = functools.partial(ppo.train, CONFIG)
    train = jax.jit(jax.vmap(jax.vmap(one, (None, 0)), (0, None)))
    keys = jnp.stack([jax.random.fold_in(jax.random.key(5), j) for j in range(5)])
    state, metrics = train(GRID, keys)
    return lambda settings, seeds: jax.tree.map(lambda x: x[:settings, :seeds], (state, metrics))


# Refusals


@pytest.mark.parametrize("num_seeds", [0, -1, 1.5, True, "3", None])
def test_the_number_of_seeds_is_a_positive_integer(num_seeds):
    with pytest.raises(ValueError, match=r"^num_seeds = .*positive integer$"):
        ppo.sweep(CONFIG, GRID, num_seeds)


@pytest.mark.parametrize("chunk_size", [0, -1, 1.5, True])
def test_the_chunk_size_is_a_positive_integer(chunk_size):
    with pytest.raises(ValueError, match=r"^chunk_size = .*positive integer$"):
        ppo.sweep(CONFIG, GRID, 2, chunk_size=chunk_size)


@pytest.mark.parametrize(
    ("config", "hparams", "message"),
    [
        (CONFIG, GRID._replace(gamma=jnp.array([0.9, 2.0])), r"^hparams\.gamma = 2: must be in \[0, 1\]$"),
        (CONFIG, GRID._replace(gamma=jnp.array([0.9, 0.8, 0.7])), r"^hparams: leaves .*\(2,\), \(3,\).*one length$"),
        (CONFIG, ppo.HParams(gamma=jnp.ones((2, 2))), r"^hparams: leaves of shapes .*\(2, 2\).*one length$"),
        (CONFIG, ppo.HParams(target_kl=[0.1, 0.2]), r"^hparams\.target_kl = 0\.1: .*kl_early_stopping"),
        ([CONFIG] * 3, GRID, r"^hparams: leaves of shapes .*\(2,\), \(3,\).*one length$"),
        ([CONFIG, tiny(env="CartPole")], GRID, r"^config\.env = 'CartPole': no such environment"),
        ([CONFIG, tiny(algorithm="trpo")], ppo.HParams(target_kl=[0.1, 0.1]), r"^hparams\.target_kl"),
        (tiny(env="CartPole"), ppo.HParams(), r"^config\.env = 'CartPole': no such environment"),
    ],
)
def test_invalid_settings_are_refused_before_anything_is_compiled(config, hparams, message, monkeypatch):
    monkeypatch.setattr(segments, "compile_programs", None)
    with pytest.raises(ValueError, match=message):
        ppo.sweep(config, hparams, 2)


def test_a_hyperparameter_that_only_some_configs_read_is_allowed():
    plan_module.make_plan([CONFIG, tiny(algorithm="trpo")], ppo.HParams(max_kl=[0.02, 0.03]), 2)


# The runs


def test_a_sweep_equals_vmap_of_train_run_by_run(swept, reference):
    result, _ = swept
    state, metrics = reference(2, 3)
    assert_close(result.metrics, metrics, rtol=1e-3, atol=1e-4)
    assert_close(result.state, state, rtol=1e-3, atol=1e-4)


def test_results_are_settings_by_seeds_by_updates(swept):
    result, _ = swept
    for name, leaf in result.metrics._asdict().items():
        assert isinstance(leaf, np.ndarray), name
        assert leaf.shape == (2, 3, 3), name
    assert result.state.obs.shape == (2, 3, 2, 4)
    np.testing.assert_allclose(result.metrics.learning_rate[:, :, 0], [[0.01] * 3, [0.02] * 3], rtol=1e-6)
    np.testing.assert_allclose(result.hparams.learning_rate, [0.01, 0.02], rtol=1e-6)
    assert result.configs == (CONFIG, CONFIG)


def test_settings_share_their_seeds(swept):
    result, _ = swept
    keys = np.asarray(jax.random.key_data(result.state.key))
    np.testing.assert_array_equal(keys[0], keys[1])
    assert len(np.unique(keys[0], axis=0)) == 3
    # The settings differ in the learning rate alone: until the first step is taken all is the same.
    for name in ("episode_return", "num_episodes", "explained_variance"):
        values = getattr(result.metrics, name)
        np.testing.assert_array_equal(values[0, :, 0], values[1, :, 0], err_msg=name)
    assert differs(result.metrics.policy_loss[0, :, 2], result.metrics.policy_loss[1, :, 2])


def test_progress_is_reported_to_the_end(swept):
    result, reports = swept
    assert [report.num_runs_done for report in reports] == [0, 0, 0, 0, 6]
    assert [report.num_steps for report in reports] == [0, 96, 96, 96, 0]
    together = np.concatenate([report.metrics.policy_loss for report in reports if report.metrics], axis=1)
    np.testing.assert_array_equal(together.reshape(2, 3, 3), result.metrics.policy_loss)


def test_steps_per_second_count_the_steps_of_all_runs(swept):
    result, _ = swept
    assert result.run_seconds > 0
    assert result.compile_seconds > 0
    np.testing.assert_allclose(result.steps_per_second * result.run_seconds, 2 * 3 * 3 * 16)


def test_the_numbers_of_a_sweep_are_those_of_its_state(swept):
    result, _ = swept
    assert (np.asarray(result.state.update_index) == 3).all()
    assert all(np.isfinite(leaf).all() for leaf in leaves(result.state.params))


@pytest.mark.parametrize(("num_runs", "cpu_width"), [(1, 8), (3, 8), (5, 2)])
def test_padding_reaches_no_result(num_runs, cpu_width, reference, monkeypatch):
    """One run on one device; three on two devices of two; five in blocks of two on two devices of four."""
    monkeypatch.setattr(plan_module, "CPU_WIDTH", cpu_width)
    result = ppo.sweep(CONFIG, ppo.HParams(ent_coef=0.01, learning_rate=0.01), num_runs, seed=5, keep_state=True)
    state, metrics = reference(1, num_runs)
    assert_close(result.metrics, metrics, rtol=1e-3, atol=1e-4)
    assert_close(result.state, state, rtol=1e-3, atol=1e-4)


def test_segments_of_unequal_length_are_the_same_runs(swept, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_SECONDS", 1e9)
    reports = []
    result = ppo.sweep(CONFIG, GRID, num_seeds=3, seed=5, keep_state=True, progress=reports.append)
    assert [report.num_steps for report in reports] == [0, 96, 192, 0]
    assert_equal(result.metrics, swept[0].metrics)
    assert_equal(result.state, swept[0].state)


def test_a_segment_lasts_a_second_however_long_the_run():
    assert segments.next_length(None, 500) == 1
    assert segments.next_length(0.1, 500) == 10
    assert segments.next_length(1e-6, 500) == 500
    assert segments.next_length(0.0, 500) == 500
    assert segments.next_length(30.0, 500) == 1
    assert segments.next_length(0.1, 3) == 3


def test_metrics_that_wait_on_the_devices_are_bounded():
    assert [segments.capacity(n, 1) for n in (1, 976, 10**6)] == [1, 976, 1000]
    assert [segments.capacity(10**6, n) for n in (1000, 4096, 10**7)] == [1000, 256, 1]


# Chunks


@pytest.fixture(scope="module")
def in_one_chunk():
    """Blocks of two runs, so that a sweep of few runs has many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "CPU_WIDTH", 2)
        return ppo.sweep(CONFIG, GRID, num_seeds=9, seed=5, chunk_size=1000, keep_state=True)


@pytest.mark.parametrize("chunk_size", [1, 3, 4, 5, 8, 17])
def test_the_chunk_size_changes_no_bit(chunk_size, in_one_chunk, monkeypatch):
    """Eighteen runs in eighteen, six, five, four, three and two chunks, full ones or padded."""
    monkeypatch.setattr(plan_module, "CPU_WIDTH", 2)
    result = ppo.sweep(CONFIG, GRID, num_seeds=9, seed=5, chunk_size=chunk_size, keep_state=True)
    assert len(in_one_chunk.plan.places) == 1
    assert len(result.plan.places) == -(-18 // chunk_size)
    assert_equal(result.metrics, in_one_chunk.metrics)
    assert_equal(result.state, in_one_chunk.state)


def test_all_devices_take_their_share_of_a_chunk(in_one_chunk):
    plan = in_one_chunk.plan
    chunk = plan.chunk(0)
    state, _ = engine.train_chunk(programs.compile_group(chunk.config, chunk.shape), chunk)
    shares = {shard.device: shard.data.shape[0] for shard in state.update_index.addressable_shards}
    assert set(shares) == set(jax.local_devices())
    assert set(shares.values()) == {chunk.shape.num_runs // 2}
    # Every device trained its share: no state is where it began.
    assert (np.asarray(state.update_index) == CONFIG.num_updates).all()


def test_a_grid_is_one_program_and_a_static_axis_of_two_is_two():
    counted = programs.compile_group
    counted.cache_clear()
    axes = {"clip_eps": [0.1, 0.2, INF], "learning_rate": [1e-3, 1e-2, 0.1]}
    ppo.sweep(CONFIG, ppo.grid(ppo.HParams(), **axes), num_seeds=2)
    assert counted.cache_info().misses == 1
    points = ppo.product(num_epochs=[1, 2], **axes)
    result = ppo.sweep(*ppo.settings(CONFIG, ppo.HParams(), points), num_seeds=2)
    assert counted.cache_info().misses == 2
    assert result.metrics.entropy.shape == (18, 2, 3)
    ppo.sweep(CONFIG, ppo.grid(ppo.HParams(gamma=0.5), **axes), num_seeds=2, seed=9)
    assert counted.cache_info().misses == 2


@pytest.mark.slow
def test_groups_come_back_in_the_order_of_the_settings(swept):
    """Static axes may alternate, and may have other numbers of updates."""
    other = tiny(total_timesteps=2 * 16, num_epochs=1, num_minibatches=1)
    configs = [CONFIG, other, CONFIG]
    result = ppo.sweep(configs, ppo.HParams(ent_coef=0.01, learning_rate=[0.01, 0.01, 0.02]), num_seeds=3, seed=5)
    assert result.metrics.policy_loss.shape == (3, 3, 3)
    assert_close(jax.tree.map(lambda leaf: leaf[[0, 2]], result.metrics), swept[0].metrics)
    shorter = ppo.sweep(other, ppo.HParams(ent_coef=0.01, learning_rate=0.01), num_seeds=3, seed=5)
    assert_close(jax.tree.map(lambda leaf: leaf[1:2, :, :2], result.metrics), shorter.metrics)
    assert np.isnan(result.metrics.policy_loss[1, :, 2]).all()
    assert (result.metrics.num_episodes[1, :, 2] == 0).all()
    assert result.metrics.all_finite[1].all()
    assert result.num_steps == 3 * (48 + 32 + 48)


@pytest.mark.parametrize("num_runs", [1, 2, 7, 16, 17, 33, 100, 128, 129, 1000, 5000])
@pytest.mark.parametrize("chunk_size", [None, 1, 10, 128, 10_000])
def test_a_plan_holds_every_run_once(num_runs, chunk_size):
    plan = plan_module.make_plan(CONFIG, ppo.HParams(), num_runs, chunk_size=chunk_size)
    (group,) = plan.groups
    np.testing.assert_array_equal(np.concatenate([runs for _, runs in plan.places]), np.arange(num_runs))
    assert max(len(runs) for _, runs in plan.places) == group.chunk_size <= group.shape.num_runs
    if chunk_size is None:
        padded = len(plan.places) * group.shape.num_runs
        assert padded - num_runs < len(plan.places) * group.shape.width * group.shape.num_devices
    else:
        assert group.chunk_size == min(chunk_size, num_runs)


def test_the_types_of_metrics_are_those_of_the_program():
    plan = plan_module.make_plan(CONFIG, GRID, 5)
    one = jax.eval_shape(functools.partial(ppo.train, CONFIG), ppo.HParams(), jax.random.key(0))[1]
    blank = engine.blank(plan)
    assert [leaf.dtype for leaf in blank] == [leaf.dtype for leaf in one]
    assert {leaf.shape for leaf in blank} == {(2, 5, *one[0].shape)}


def test_a_chunk_has_what_its_numbers_depend_on():
    plan = plan_module.make_plan(CONFIG, GRID, 5, seed=3, chunk_size=4)
    chunk = plan.chunk(1)  # runs 4 to 7: the last seed of the first setting, three of the second
    np.testing.assert_array_equal(chunk.seeds, [4, 0, 1, 2])
    np.testing.assert_allclose(chunk.hparams.learning_rate, [0.01, 0.02, 0.02, 0.02], rtol=1e-6)
    assert (chunk.config, chunk.seed, chunk.num_steps) == (CONFIG, 3, 4 * 48)


@pytest.mark.parametrize("most", [10**9, 5000, 1000, 300, 40, 2, 1])
def test_a_plan_shrinks_until_its_programs_fit(most, monkeypatch):
    """With a program that needs a byte a run."""
    program = lambda config, shape: segments.Programs(None, None, None, shape.num_runs // shape.num_devices)  # noqa: E731
    monkeypatch.setattr(engine, "_rough_num_bytes", lambda config, shape: INF)
    plan = plan_module.make_plan(CONFIG, GRID, 500, chunk_size=700)
    fitted = engine.fit(plan, most, program)
    (group,) = fitted.groups
    assert group.shape.num_runs <= 2 * max(most, 2)  # two runs a device is the least
    np.testing.assert_array_equal(np.concatenate([runs for _, runs in fitted.places]), np.arange(1000))
    if most >= 700:
        assert fitted.groups == plan.groups


@pytest.mark.slow
@pytest.mark.parametrize("hidden_sizes", [(8,), (64, 64)])
def test_the_rough_number_of_bytes_is_within_a_factor_of_four(hidden_sizes):
    config = tiny(hidden_sizes=hidden_sizes, num_steps=64, total_timesteps=128)
    shape = plan_module.Shape(2, 8, 2)
    ratio = engine._rough_num_bytes(config, shape) / programs.compile_group(config, shape).num_bytes
    assert 1 / 4 < ratio < 4


EIGHT_DEVICES = """
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", {devices})
import purejaxppo as ppo
from purejaxppo.plan import make_plan
from purejaxppo.segments import compile_programs
from purejaxppo.sweep import train_chunk
config = ppo.Config(total_timesteps=48, num_envs=2, num_steps=8, num_epochs=1, num_minibatches=1, hidden_sizes=(8,))
plan = make_plan(config, ppo.grid(ppo.HParams(), learning_rate=[0.01, 0.02]), 12, seed=5)
chunk = plan.chunk(0)
state, metrics = train_chunk(compile_programs(config, chunk.shape), chunk)
shards = state.update_index.addressable_shards
print(len({{shard.device for shard in shards}}), min(int(shard.data.min()) for shard in shards))
print(*np.asarray(metrics.value_loss).reshape(-1))
"""


@pytest.mark.slow
def test_eight_devices_give_what_one_gives():
    numbers = {}
    for devices in (1, 8):
        first, second = run_python(EIGHT_DEVICES.format(devices=devices), timeout=120).strip().split("\n")
        assert first.split() == [str(devices), "3"]  # every device took its share to the last update
        numbers[devices] = np.array(second.split(), float)
    assert numbers[8].shape == (24 * 3,)
    np.testing.assert_allclose(numbers[8], numbers[1], rtol=1e-4)


# Layout


@pytest.mark.parametrize(("num_runs", "num_devices"), [*itertools.product([1, 2, 3, 8, 16, 17, 33, 1000], [1, 2, 3])])
def test_the_layout_holds_every_run_in_full_blocks(num_runs, num_devices):
    class Mesh:
        size = num_devices
        devices = np.array(jax.local_devices()[:1])

    width, padded = devices_module.layout(num_runs, Mesh, plan_module.CPU_WIDTH)
    assert padded >= num_runs
    assert padded % (width * num_devices) == 0
    assert 1 <= width <= plan_module.CPU_WIDTH
    assert padded - num_runs < 2 * num_devices * plan_module.CPU_WIDTH


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


@pytest.mark.parametrize(("arguments", "devices"), [("at_most=1", 1), ("at_least=3", 3), ("3, at_most=3", 3)])
def test_cores_have_bounds(arguments, devices):
    program = f"import jax, purejaxppo as ppo; ppo.use_all_cores({arguments}); print(len(jax.devices()))"
    assert run_python(program, timeout=60).strip() == str(devices)


LOOPS_PROGRAM = """
import os, jax, purejaxppo as ppo
from purejaxppo import devices
before = devices.has_kernel_loops()
ppo.use_all_cores()
loop = jax.jit(lambda x: jax.lax.fori_loop(0, 9, lambda i, x: jax.numpy.sin(x) + 1, x)).lower(jax.numpy.ones(400))
print(before, devices.has_kernel_loops(), "xla_cpu_small_call" in loop.compile().as_text(), os.environ["XLA_FLAGS"])
"""


@pytest.mark.parametrize(
    ("flags", "made"),
    [
        ("", "True True"),
        ("--xla_dump_to=", "True True"),
        ("--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=9", "False False"),
    ],
)
def test_small_loops_become_kernels_unless_the_user_decides(flags, made):
    before, *now, kept = run_python(LOOPS_PROGRAM, timeout=60, XLA_FLAGS=flags).split(maxsplit=3)
    assert (before, " ".join(now)) == ("False", made)
    assert kept.strip().startswith(flags)
    assert (devices_module.KERNEL_LOOPS in kept) == (made == "True True")


@pytest.mark.parametrize(("at_least", "at_most", "allowed"), [(1, 0, 1), (3, 2, 3)])
def test_bounds_of_cores_that_exclude_each_other_are_refused(at_least, at_most, allowed):
    with pytest.raises(ValueError, match=f"at_most = {at_most}: must be at least {allowed}"):
        ppo.use_all_cores(at_least, at_most)


def test_all_cores_can_be_asked_for_after_the_import_and_not_later():
    devices, *_ = run_python(CORES_PROGRAM, timeout=60).split()
    assert int(devices) == len(os.sched_getaffinity(0))
