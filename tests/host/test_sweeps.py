"""Sweeps with a directory: every chunk kept whole, gone on with, refused to another sweep; results out and in."""

import functools
import importlib
import shutil

import numpy as np
import pytest

import purejaxppo as ppo
from purejaxppo import results
from purejaxppo.host import chunks, cluster, memory, programs, sweeps
from purejaxppo.plan import make_plan
from purejaxppo.segments import Programs
from tests.helpers import assert_equal, tiny

engine = importlib.import_module("purejaxppo.sweep")

CONFIG = tiny(total_timesteps=3 * 16, num_epochs=1, num_minibatches=1)
GRID = ppo.grid(ppo.HParams(), learning_rate=[0.01, 0.02], gamma=[0.9, 0.99])
train = functools.partial(ppo.sweep, CONFIG, GRID, 3, seed=5, chunk_size=5)  # twelve runs in three chunks


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A finished sweep and its directory."""
    directory = tmp_path_factory.mktemp("sweep")
    return train(directory=directory), directory


@pytest.fixture
def copy(kept, tmp_path):
    """A directory to do harm to."""
    shutil.copytree(kept[1], tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture
def counted(monkeypatch):
    """The chunks that are trained."""
    trained = []

    def train_chunk(programs, chunk, moved):
        trained.append(chunk)
        return engine.train_chunk(programs, chunk)

    monkeypatch.setattr(sweeps, "train_chunk", train_chunk)
    return trained


def assert_same(result, expected):
    assert_equal(result.metrics, expected.metrics)
    assert_equal(result.hparams, expected.hparams)
    assert result.configs == expected.configs


# The directory


def test_the_directory_changes_nothing(kept):
    result, directory = kept
    assert_same(train(), result)
    assert sorted(path.name for path in (directory / "chunks").iterdir()) == ["00000.npz", "00001.npz", "00002.npz"]


def test_a_finished_sweep_is_not_trained_again(kept, copy, counted):
    assert_same(train(directory=copy), kept[0])
    assert counted == []


def test_missing_chunks_alone_are_trained(kept, copy, counted):
    (copy / "chunks" / "00001.npz").unlink()
    reports = []
    assert_same(train(directory=copy, progress=reports.append), kept[0])
    assert [list(chunk.seeds) for chunk in counted] == [[2, 0, 1, 2, 0]]  # runs 5 to 9
    assert reports[0].num_runs_done == 7
    assert reports[-1].num_runs_done == 12


def harm(path, kind):
    content = bytearray(path.read_bytes())
    if kind == "truncated":
        content = content[: len(content) // 2]
    elif kind == "empty":
        content = bytearray()
    elif kind == "flipped":
        content[content.index(b"NUMPY") + 140] ^= 1  # in the first array
    elif kind == "another":
        content = (path.parent / "00002.npz").read_bytes()
    path.write_bytes(content)


@pytest.mark.parametrize("kind", ["truncated", "empty", "flipped", "another"])
def test_a_damaged_chunk_is_trained_again_with_a_note(kind, kept, copy, counted):
    harm(copy / "chunks" / "00000.npz", kind)
    with pytest.raises(ValueError, match="1 of 3 chunks are missing or damaged"), pytest.warns(match="damaged"):
        ppo.SweepResult.load(copy)
    with pytest.warns(UserWarning, match=r"00000\.npz: damaged .*; this chunk counts as not run$"):
        assert_same(train(directory=copy), kept[0])
    assert len(counted) == 1
    assert_same(ppo.SweepResult.load(copy), kept[0])


def test_what_was_left_half_written_is_removed(kept, copy):
    (copy / "chunks" / ".partial-00002.npz").write_text("half")
    assert_same(train(directory=copy), kept[0])
    assert not (copy / "chunks" / ".partial-00002.npz").exists()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda d: ppo.sweep(CONFIG, GRID, 4, seed=5, directory=d), "num_seeds$"),
        (lambda d: ppo.sweep(CONFIG, GRID, 3, seed=6, directory=d), " seed$"),
        (lambda d: ppo.sweep(tiny(num_epochs=1), GRID, 3, seed=5, directory=d), "config.total_timesteps, config.num_m"),
        (lambda d: ppo.sweep(CONFIG, GRID._replace(clip_eps=0.3), 3, seed=5, directory=d), "hparams.clip_eps$"),
        (lambda d: ppo.sweep(CONFIG, ppo.HParams(), 3, seed=5, directory=d), "the number of settings$"),
    ],
)
def test_the_directory_of_another_sweep_is_refused(other, message, copy):
    before = sorted((path, path.stat().st_mtime_ns) for path in copy.rglob("*"))
    with pytest.raises(ValueError, match=f"holds another sweep, which differs in.*{message}"):
        other(copy)
    assert sorted((path, path.stat().st_mtime_ns) for path in copy.rglob("*")) == before


def test_another_chunk_size_is_refused_and_none_takes_the_one_there(kept, copy, counted):
    with pytest.raises(ValueError, match=r"chunk_size = 6: .* was begun with chunks of 5 runs$"):
        train(directory=copy, chunk_size=6)
    assert_same(train(directory=copy, chunk_size=None), kept[0])
    assert counted == []


def test_an_unreadable_plan_is_refused(copy):
    (copy / "plan.toml").write_text("seed = 'three")
    with pytest.raises(ValueError, match=r"plan\.toml: cannot be read as the plan of a sweep"):
        train(directory=copy)
    (copy / "plan.toml").write_text("seed = 3")
    with pytest.raises(ValueError, match=r"plan\.toml: cannot be read as the plan of a sweep"):
        train(directory=copy)


def test_other_versions_are_told(kept, copy):
    plan = copy / "plan.toml"
    content = plan.read_text()
    start = content.index("[versions]")
    plan.write_text(content[:start] + '[versions]\njax = "0.1"\n')
    with pytest.warns(UserWarning, match=r"was begun with other versions, last bits may differ: .*jax 0\.1 -> "):
        train(directory=copy)


def test_a_sweep_of_more_devices_than_there_are_is_refused(copy):
    plan = copy / "plan.toml"
    plan.write_text(plan.read_text().replace("num_devices = 2", "num_devices = 3"))
    with pytest.raises(ValueError, match=r"was begun on 3 devices, of which there are 2 here; .*at_least=3"):
        train(directory=copy)


def test_two_processes_do_not_share_a_directory(kept, copy):
    held = chunks.Store(copy, kept[0].plan)
    with pytest.raises(ValueError, match="another process is working on this sweep"):
        train(directory=copy)
    held.close()
    train(directory=copy)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="cannot be written to"):
        train(directory=tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_plan_comes_back_from_its_file(tmp_path):
    configs = [CONFIG, tiny(env="Acrobot-v1", env_params={"max_steps_in_episode": 7}), CONFIG]
    plan = make_plan(configs, ppo.HParams(clip_eps=[0.1, 0.2, float("inf")]), 3, seed=2**40, chunk_size=4)
    chunks.Store(tmp_path, plan).close()
    found = chunks.find(tmp_path)
    assert (found.configs, found.groups, found.num_seeds, found.seed) == (plan.configs, plan.groups, 3, 2**40)
    assert_equal(found.hparams, plan.hparams)
    for index in range(len(plan.places)):
        assert_equal(found.chunk(index).hparams, plan.chunk(index).hparams)
        np.testing.assert_array_equal(found.chunk(index).seeds, plan.chunk(index).seeds)


# Results


def test_a_result_saved_is_the_result_loaded(kept, tmp_path):
    result, _ = kept
    result.save(tmp_path / "saved")
    assert_same(ppo.SweepResult.load(tmp_path / "saved"), result)
    with pytest.raises(ValueError, match="holds another sweep"):
        ppo.sweep(CONFIG, GRID, 3, seed=6).save(tmp_path / "saved")


def test_a_directory_without_a_sweep_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no sweep$"):
        ppo.SweepResult.load(tmp_path)
    with pytest.raises(ValueError, match=r"holds no sweep$"):
        ppo.SweepResult.load(tmp_path / "nowhere")


def test_a_row_a_run(kept):
    result, _ = kept
    frame = result.to_dataframe()
    assert list(frame.columns[:4]) == ["setting", "seed", "learning_rate", "gamma"]
    assert list(frame["seed"]) == [0, 1, 2] * 4
    assert list(frame["learning_rate"]) == [0.01] * 6 + [0.02] * 6
    assert list(frame["gamma"]) == ([0.9] * 3 + [0.99] * 3) * 2
    np.testing.assert_array_equal(frame["final_return"], results.final_return(result.metrics).reshape(-1))
    assert frame["finite"].all()


def test_a_row_an_update():
    """Of settings with different numbers of updates."""
    configs = [CONFIG, tiny(total_timesteps=2 * 16, num_epochs=1, num_minibatches=1)]
    plan = make_plan(configs, ppo.HParams(), 2)
    metrics = engine.blank(plan)
    metrics.entropy[:] = np.random.default_rng(0).normal(size=(2, 2, 3))
    frame = ppo.SweepResult(plan, metrics).to_dataframe(curves=True)
    assert list(frame["update"]) == [0, 1, 2] * 2 + [0, 1] * 2
    assert list(frame["total_timesteps"]) == [48] * 6 + [32] * 4
    np.testing.assert_array_equal(frame["entropy"][:6], metrics.entropy[0].reshape(-1))
    np.testing.assert_array_equal(frame["entropy"][6:], metrics.entropy[1, :, :2].reshape(-1))


def test_summaries_are_those_of_results(kept):
    result, _ = kept
    np.testing.assert_equal(result.summary(10.0), results.summary(result.metrics, [3] * 4, [16] * 4, 10.0))
    assert result.best() == results.best(result.summary())


# Memory


def test_more_results_than_memory_are_refused(monkeypatch):
    monkeypatch.setattr(memory, "free", lambda: 2**20)
    with pytest.raises(ValueError, match=r"^num_seeds = 100000: the metrics of 400,000 runs take .*, and 1\.0 MiB"):
        ppo.sweep(CONFIG, GRID, 100_000)


def test_a_chunk_that_does_not_fit_is_refused_with_one_that_does(monkeypatch):
    need = programs.compile_group(CONFIG, train().plan.groups[0].shape).num_bytes
    program = lambda config, shape: Programs(None, None, None, need * shape.num_runs // 12)  # noqa: E731
    monkeypatch.setattr(memory, "compile_group", program)
    monkeypatch.setattr(memory, "of_device", lambda: need * 10)
    with pytest.raises(ValueError, match=r"^chunk_size = 1000: needs .* of each device, .* are free; \d+ fits$"):
        ppo.sweep(CONFIG, GRID, 1000, chunk_size=1000)
    plan = memory.fit_plan(make_plan(CONFIG, GRID, 1000), None)
    assert plan.groups[0].shape.num_runs <= 120


def test_there_is_memory_and_it_has_words():
    assert 2**20 < memory.free() < 2**60
    assert memory.of_device() <= memory.free()
    assert [memory.text(n) for n in (12, 2048, 3 * 2**20, 2500 * 2**30)] == [
        "12 bytes",
        "2.0 KiB",
        "3.0 MiB",
        "2,500.0 GiB",
    ]


# Executors


@pytest.mark.parametrize("options", [{"executor": "dask"}, {"executor": "ray", "keep_state": True}])
def test_an_executor_that_does_not_exist_or_cannot_is_refused(options):
    with pytest.raises(ValueError, match=r"^executor = 'dask': allowed: 'local', 'ray'$|^keep_state = True"):
        train(**options)


def test_ray_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(importlib.sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"Ray is not installed; pip install 'purejaxppo\[ray\]'$"):
        train(executor="ray")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:99999999"])
def test_a_cluster_that_does_not_answer_is_told_at_once(address, monkeypatch):
    monkeypatch.setattr(cluster, "REACH_SECONDS", 0.5)
    with pytest.raises(ValueError, match=f"^ray_address = '{address}': no cluster answers there"):
        train(executor="ray", ray_address=address)


@pytest.mark.parametrize("address", ["somewhere", "host:port", ":6379"])
def test_an_address_has_a_host_and_a_port(address):
    with pytest.raises(ValueError, match=f"^ray_address = '{address}': must be host:port"):
        train(executor="ray", ray_address=address)
