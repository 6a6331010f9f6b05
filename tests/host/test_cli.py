"""The command line, in its own process state: exit codes, run directories, one-line errors."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from purejaxppo.host import cli, experiment, files, store

SMALL = "[config]\ntotal_timesteps = 2048\nnum_steps = 64\nhidden_sizes = [8]\n"


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.fixture
def one_device(monkeypatch):
    """`train` in this process: the devices were chosen when the tests began."""
    monkeypatch.setattr("purejaxppo.use_all_cores", lambda at_least=1: None)


def run(*arguments, code, capsys):
    assert cli.main([str(argument) for argument in arguments]) == code
    return capsys.readouterr()


def test_train_leaves_a_complete_run_directory(small, tmp_path, capsys, one_device):
    out = tmp_path / "out"
    printed = run("train", small, "--num-seeds", 3, "--seed", 5, "--out", out, code=0, capsys=capsys).out
    assert sorted(path.name for path in out.iterdir()) == [
        "checkpoints",
        "config.toml",
        "curves.png",
        "metrics.npz",
        "summary.json",
    ]
    assert "steps/s" in printed
    metrics = store.read_metrics(out / "metrics.npz")
    assert metrics.episode_return.shape == (3, 8)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["num_seeds"] == 3
    assert summary["final_return"]["interquartile_mean"] == pytest.approx(np.mean(summary["final_return"]["per_run"]))
    assert {"jax", "gymnax", "python"} <= set(summary["versions"])
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")

    run("train", out / "config.toml", "--out", tmp_path / "again", code=0, capsys=capsys)
    again = store.read_metrics(tmp_path / "again" / "metrics.npz")
    for name, leaf in metrics._asdict().items():
        np.testing.assert_array_equal(leaf, getattr(again, name), err_msg=name)


def test_flags_override_the_file(small, tmp_path, capsys, one_device):
    flags = ("--config.num_envs", 2, "--config.num-epochs", 1, "--hparams.gamma", 0.5, "--hparams.clip_eps", "inf")
    run("train", small, *flags, "--num-seeds", 1, "--out", tmp_path / "out", code=0, capsys=capsys)
    saved = experiment.read(tmp_path / "out" / "config.toml")
    assert (saved.config.num_envs, saved.config.num_epochs, saved.config.num_steps) == (2, 1, 64)
    assert (saved.hparams.gamma, saved.hparams.clip_eps) == (0.5, float("inf"))


def test_a_diverged_run_is_named_and_everything_saved(small, tmp_path, capsys, one_device):
    out = tmp_path / "out"
    flags = ("--config.activation", "relu", "--hparams.learning-rate", "1e6", "--num-seeds", 4, "--out", out)
    printed = run("train", small, *flags, code=1, capsys=capsys).err
    broken = ~store.read_metrics(out / "metrics.npz").all_finite
    named = {str(run): int(broken[run].argmax()) for run in np.flatnonzero(broken.any(axis=1))}
    assert named
    assert json.loads((out / "summary.json").read_text())["diverged"] == named
    assert dict(re.findall(r"(\d+) \(from update (\d+) on\)", printed)) == {k: str(v) for k, v in named.items()}


BAD = {
    ("--config.num-env", "4"): "--config.num-env: there is no such argument; did you mean --config.num-envs?",
    ("--hparams.learning_rat", "4"): "did you mean --hparams.learning-rate?",
    ("--config.env", "CartPole-v2"): "'CartPole-v2': no such environment; close ones: CartPole-v1",
    ("--config.network", "cn"): "config.network = 'cn': allowed: 'mlp', 'cnn', 'gru'; did you mean 'cnn'?",
    ("--config.num-minibatches", "3"): "config.num_minibatches = 3: must divide",
    ("--config.num-envs", "0"): "config.num_envs = 0",
    ("--config.num-steps", "-1"): "config.num_steps = -1",
    ("--config.num-envs", "four"): "--config.num-envs",
    ("--config.total-timesteps", "100"): "must be at least one update, num_envs * num_steps = 256",
    ("--config.algorithm", "pop"): "config.algorithm = 'pop': allowed: 'ppo', 'trpo'; did you mean 'ppo'?",
    ("--config.env-params", "gravitas", "3"): "config.env_params.gravitas: CartPole-v1 has no such parameter",
    ("--hparams.clip-eps", "0"): "hparams.clip_eps = 0: must be in (0, inf]",
    ("--hparams.clip-eps", "-0.1"): "hparams.clip_eps = -0.1",
    ("--hparams.gamma", "1.01"): "hparams.gamma = 1.01: must be in [0, 1]",
    ("--hparams.learning-rate", "nan"): "hparams.learning_rate = nan",
    ("--hparams.target-kl", "0.01"): "is read only with config.kl_early_stopping = true",
    ("--num-seeds", "0"): "num_seeds = 0",
    ("--num-seeds",): "Missing value for argument '--num-seeds'",
}


@pytest.mark.parametrize("flags", BAD, ids=" ".join)
def test_bad_input_is_one_line_exit_2_and_nothing_written(flags, small, tmp_path, capsys, one_device):
    out = tmp_path / "out"
    captured = run("train", small, "--out", out, *flags, code=2, capsys=capsys)
    assert BAD[flags] in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not out.exists()


@pytest.mark.parametrize("arguments", [(), ("trian",), ("train",), ("train", "none.toml")])
def test_a_bad_command_exits_2(arguments, capsys):
    run(*arguments, code=2, capsys=capsys)


def test_a_directory_that_holds_a_run_is_left_alone(small, tmp_path, capsys, one_device):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.toml").write_text("an earlier run")
    captured = run("train", small, "--out", out, code=2, capsys=capsys)
    assert "holds a run already" in captured.err
    assert [path.name for path in out.iterdir()] == ["config.toml"]
    assert (out / "config.toml").read_text() == "an earlier run"


def test_an_output_path_that_is_a_file_is_refused(small, tmp_path, capsys, one_device):
    (tmp_path / "out").write_text("mine")
    assert "cannot be made" in run("train", small, "--out", tmp_path / "out", code=2, capsys=capsys).err
    assert (tmp_path / "out").read_text() == "mine"


def test_help_lists_every_field(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    for flag in ("--num-seeds", "--config.env", "--config.env-params", "--hparams.target-kl"):
        assert flag in printed


def test_a_file_under_its_own_name_is_complete(tmp_path):
    def fails_half_way():
        with files.partial(tmp_path / "file") as path:
            path.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails_half_way()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_command_uses_every_core_and_stops_on_ctrl_c(small, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "purejaxppo.host.cli", "train", str(small), "--num-seeds", "4"]
    subprocess.run([*command, "--out", "out"], cwd=tmp_path, env=environment, check=True, timeout=120)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["device"]["count"] == min(4, len(os.sched_getaffinity(0)))

    long = [*command, "--config.total-timesteps", "500000000", "--out", "stopped"]
    process = subprocess.Popen(
        long,
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "stopped").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped" in errors
    assert not Path(tmp_path / "stopped" / "metrics.npz").exists()
