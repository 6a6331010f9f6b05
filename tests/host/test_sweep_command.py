"""`purejaxppo sweep` and `plot`: files, refusals in one line, and the same bits however a sweep is run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import purejaxppo as ppo
from purejaxppo.host import cli, experiment
from purejaxppo.plan import make_plan
from tests.helpers import assert_equal

BASE = "[config]\ntotal_timesteps = 256\nnum_envs = 2\nnum_steps = 32\nnum_epochs = 1\nhidden_sizes = [8]\n"
GRID = "[grid]\nclip_eps = [0.2, inf]\nlearning_rate = [1e-3, 1e-2]\n"


@pytest.fixture
def write(tmp_path):
    def write(text):
        (tmp_path / "sweep.toml").write_text(text)
        return tmp_path / "sweep.toml"

    return write


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """In this process: the devices were chosen when the tests began."""
    monkeypatch.setattr("purejaxppo.use_all_cores", lambda at_least=1: None)


def run(*arguments, code, capsys):
    assert cli.main([str(argument) for argument in arguments]) == code
    return capsys.readouterr()


def test_a_sweep_leaves_a_complete_directory_and_can_be_drawn_again(write, tmp_path, capsys):
    out = tmp_path / "out"
    printed = run("sweep", write(BASE + GRID), "--num-seeds", 3, "--out", out, code=0, capsys=capsys).out
    assert "4 settings x 3 seeds" in printed
    assert {path.name for path in out.iterdir()} == {
        ".lock",
        "chunks",
        "curves.png",
        "heat_map.png",
        "plan.toml",
        "runs.csv",
        "summary.json",
        "sweep.toml",
    }
    result = ppo.SweepResult.load(out)
    assert result.metrics.entropy.shape == (4, 3, 4)
    assert result.axes["clip_eps"] == (0.2, 0.2, float("inf"), float("inf"))
    summary = json.loads((out / "summary.json").read_text())
    assert [row["learning_rate"] for row in summary["settings"]] == [1e-3, 1e-2, 1e-3, 1e-2]
    assert len((out / "runs.csv").read_text().splitlines()) == 1 + 12

    stored = (out / "chunks" / "00000.npz").stat().st_mtime_ns
    run("sweep", out / "sweep.toml", "--out", out, code=0, capsys=capsys)  # what was written says the same
    assert (out / "chunks" / "00000.npz").stat().st_mtime_ns == stored

    for name in ("curves.png", "heat_map.png"):
        (out / name).unlink()
    assert "steps to 9" in run("plot", out, "--threshold", 9, code=0, capsys=capsys).out
    for name in ("curves.png", "heat_map.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_finished_run_is_drawn_again(write, tmp_path, capsys):
    out = tmp_path / "out"
    run("train", write(BASE), "--num-seeds", 2, "--out", out, code=0, capsys=capsys)
    (out / "curves.png").unlink()
    run("plot", out, code=0, capsys=capsys)
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_dry_run_tells_and_writes_nothing(write, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(BASE + "[grid]\nbootstrap_truncated = [true, false]\ngamma = [0.9, 0.8]\n")
    printed = run("sweep", path, "--num-seeds", 6, "--chunk-size", 5, "--dry-run", code=0, capsys=capsys).out
    assert printed.count("3 x 5") == 2  # two programs of twelve runs
    assert "24 runs, 2 program(s), 6 chunk(s)" in printed
    assert "bootstrap_trunc" in printed
    assert list(tmp_path.iterdir()) == [path]


def test_a_diverged_run_is_exit_code_1(write, tmp_path, capsys):
    path = write(
        BASE.replace("[config]\n", '[config]\nactivation = "relu"\n') + "[grid]\nlearning_rate = [1e-3, 1e30]\n"
    )
    run("sweep", path, "--num-seeds", 2, "--out", tmp_path / "out", code=1, capsys=capsys)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [row["diverged"] > 0 for row in summary["settings"]] == [False, True]


BAD = {
    BASE + "[grid]\nclip_epsilon = [0.1]\n": "sweep.clip_epsilon: there is no such setting; did you mean 'clip_eps'?",
    BASE + "[grid]\nclip_eps = []\n": "clip_eps = []: must be a list of at least one value",
    BASE + "[grid]\nclip_eps = 0.1\n": "clip_eps = 0.1: must be a list of at least one value",
    BASE + "[grid]\nclip_eps = [0.1, '0.2']\n": "hparams.clip_eps = '0.2': must be a number",
    BASE + "[grid]\nclip_eps = [0.1, -1.0]\n": "hparams.clip_eps = -1: must be in (0, inf]",
    BASE + "[grid]\nnum_minibatches = [4, 3]\n": "config.num_minibatches = 3: must divide",
    BASE + "[grid]\nenv = ['CartPole-v1', 'Cartpole-v1']\n": "config.env = 'Cartpole-v1': no such environment",
    BASE + "[grid]\nalgorithm = ['trpo', 'pop']\n": "config.algorithm = 'pop': allowed: 'ppo', 'trpo'",
    BASE + "[hparams]\ngamma = 0.9\n[grid]\ngamma = [0.5]\n": "hparams.gamma = 0.9: is an axis of the sweep too",
    BASE + "[random]\ngamma = { uniform = [0.5, 1.0] }\n": "random.num_settings = None: must be a positive integer",
    BASE + "[random]\nnum_settings = 2\ngamma = [0.5]\n": "random.gamma = [0.5]: must be { uniform = [low, high] }",
    BASE + "[random]\nnum_settings = 2\ngamma = { log_uniform = [0.0, 1.0] }\n": "log_uniform = [0, 1]: must be 0",
    BASE + "[random]\nnum_settings = 2\ngama = { choice = [1.0] }\n": "sweep.gama: there is no such setting",
    BASE + "[[list]]\nnum_step = 3\n": "sweep.num_step: there is no such setting; did you mean 'num_steps'?",
    "list = [1]\n" + BASE: "list = [1]: must be at least one table of fields",
    BASE + GRID + "[[list]]\nnum_steps = 3\n": "has grid and list: must have one of [grid], [random] and [[list]]",
    "num_seeds = 0\n" + BASE + GRID: "num_seeds = 0: must be a positive integer",
    BASE + "[girds]\nclip_eps = [0.1]\n": "girds: there is no such setting",
}


@pytest.mark.parametrize("text", BAD, ids=BAD.get)
def test_a_bad_file_is_one_line_exit_2_and_nothing_written(text, write, tmp_path, capsys):
    captured = run("sweep", write(text), "--out", tmp_path / "out", code=2, capsys=capsys)
    assert BAD[text] in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


BAD_FLAGS = {
    ("--executor", "dask"): "executor = 'dask': allowed: 'local', 'ray'",
    ("--ray-address", "127.0.0.1:6379"): "--ray-address 127.0.0.1:6379: is read only with --executor ray",
    ("--executor", "ray", "--ray-address", "127.0.0.1:1"): "ray_address = '127.0.0.1:1': no cluster answers there",
    ("--chunk-size", "0"): "chunk_size = 0: must be a positive integer",
    ("--chunk-siz", "4"): "did you mean --chunk-size?",
    ("--hparams.clip-eps", "0.3"): "hparams.clip_eps = 0.3: is an axis of the sweep too; leave one of the two out",
}


@pytest.mark.parametrize("flags", BAD_FLAGS, ids=" ".join)
def test_a_bad_flag_is_one_line_exit_2_and_nothing_written(flags, write, tmp_path, capsys):
    captured = run("sweep", write(BASE + GRID), "--out", tmp_path / "out", *flags, code=2, capsys=capsys)
    assert BAD_FLAGS[flags] in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [("sweep",), ("plot",), ("sweep", "none.toml"), ("plot", "nowhere")])
def test_a_command_without_its_file_exits_2(arguments, capsys):
    assert run(*arguments, code=2, capsys=capsys).err.count("\n") == 1


@pytest.mark.parametrize(
    "axes",
    [
        ("grid", {"clip_eps": [0.1, float("inf")], "hidden_sizes": [[8], [8, 8]]}),
        ("random", {"num_settings": 3, "seed": 4, "gamma": {"uniform": [0.5, 1.0]}, "num_steps": {"choice": [32, 64]}}),
        ("list", [{"gamma": 0.5}, {"num_steps": 64}, {}]),
        experiment.ONE,
    ],
)
def test_what_is_written_reads_back_as_the_same_sweep(axes, write):
    base = experiment.Experiment(num_seeds=3, hparams=ppo.HParams(gae_lambda=0.5))
    path = write(experiment.to_toml(base, axes))
    assert experiment.read_sweep(path) == (base, axes)
    points = experiment.points_of(axes)
    assert len(points) == {"grid": 4, "random": 3}.get(axes[0], len(axes[1]))
    ppo.settings(base.config, base.hparams, points)


@pytest.mark.parametrize("name", ["cartpole-clip-lr", "cartpole-seeds", "minatar-random"])
def test_the_sweeps_to_start_from_are_valid(name):
    base, axes = experiment.read_sweep(Path(__file__).parents[2] / "configs" / "sweeps" / f"{name}.toml")
    experiment.check_base(base, axes)
    configs, hparams = ppo.settings(base.config, base.hparams, experiment.points_of(axes))
    assert len(configs) * base.num_seeds == {"cartpole-clip-lr": 1152, "cartpole-seeds": 1024}.get(name, 96)
    make_plan(configs, hparams, base.num_seeds)


# The same bits


def wait_for_chunks(directory, number, process):
    deadline = time.monotonic() + 300
    while len(list(directory.glob("chunks/*.npz"))) < number:
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ray_workers():
    """Processes that train a chunk for Ray."""
    listed = subprocess.run(["pgrep", "-f", "ray::train_remotely"], capture_output=True, text=True, check=False)
    return [int(pid) for pid in listed.stdout.split()]


@pytest.mark.slow
def test_one_chunk_many_chunks_killed_and_on_ray_give_the_same_bits(write, tmp_path):
    path = write("num_seeds = 24\n[config]\ntotal_timesteps = 10240\n" + GRID)
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}

    def start(out, *flags):
        command = [sys.executable, "-m", "purejaxppo.host.cli", "sweep", str(path), "--out", str(out), *flags]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    assert start(tmp_path / "one", "--chunk-size", "1000").wait(300) == 0
    cut = ("--chunk-size", "12")
    assert start(tmp_path / "many", *cut).wait(300) == 0

    for kills in (1, 3, 5):
        process = start(tmp_path / "killed", *cut)
        wait_for_chunks(tmp_path / "killed", kills, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert start(tmp_path / "killed", *cut).wait(300) == 0

    process = start(tmp_path / "ray", *cut, "--executor", "ray")
    wait_for_chunks(tmp_path / "ray", 1, process)
    os.kill(ray_workers()[0], signal.SIGKILL)
    assert process.wait(300) == 0

    results = {name: ppo.SweepResult.load(tmp_path / name) for name in ("one", "many", "killed", "ray")}
    assert [len(result.plan.places) for result in results.values()] == [1, 8, 8, 8]
    for result in results.values():
        assert_equal(result.metrics, results["one"].metrics)
    assert len(np.unique(results["one"].metrics.policy_loss[..., -1])) > 90
