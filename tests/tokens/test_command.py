"""`purejaxppo rlhf`: what its files say, what it leaves, and that it goes on where it was interrupted."""

import dataclasses
import importlib.util
import json
import pathlib

import numpy as np
import pytest

from purejaxppo.host import cli, rlhf, rlhf_experiment, rlhf_stages
from purejaxppo.host.rlhf_experiment import RlhfExperiment
from purejaxppo.tokens.config import TokenConfig, TokenHParams
from purejaxppo.tokens.segments import Runs

CONFIGS = sorted(
    path
    for kind in ("rlhf", "grpo", "dpo")
    for path in pathlib.Path(__file__).parents[2].glob(f"configs/{kind}-*.toml")
)
TINY = """
num_seeds = 2
kl_coefs = [1.0, 0.5]
eval_responses = 64
[config]
task = "enum"
task_params = { width = 8 }
num_updates = 3
batch_size = 8
"""
NAMES = """
num_seeds = 2
kl_coefs = [0.5, 0.1]
num_pairs = [8, 32]
eval_responses = 64
[config]
task = "names"
task_params = { width = 8 }
num_updates = 2
batch_size = 8
[reference]
num_steps = 30
[reward]
num_steps = 20
batch_size = 8
"""


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_read_and_written_back(path, tmp_path):
    experiment = rlhf_experiment.read(path)
    (tmp_path / "again.toml").write_text(rlhf_experiment.to_toml(experiment))
    assert rlhf_experiment.read(tmp_path / "again.toml") == experiment
    assert path.read_text().startswith(f"# purejaxppo rlhf configs/{path.name}")


def test_there_are_five_configs():
    names = {"rlhf-tokencount", "rlhf-enum", "rlhf-names", "grpo-names", "dpo-names"}
    assert {path.stem for path in CONFIGS} == names


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_pairs": (10, 20)}, r"num_pairs = \(10, 20\): is read only with config.task = 'names'"),
        ({"num_pairs": ()}, r"num_pairs = \[\]: must be a list of at least one"),
        ({"sharpness": 0.0}, r"sharpness = 0.0: must be in \(0, inf\]"),
        ({"kl_coefs": ("a",)}, r"kl_coefs = \('a',\): must be a list of numbers"),
        ({"kl_coefs": (-1.0,)}, r"hparams.kl_coef = -1: must be in \[0, inf\)"),
        ({"num_seeds": 0}, "num_seeds = 0: must be a positive integer"),
        ({"config": TokenConfig(task_params={"depth": 2})}, "task_params.depth: there is no such setting"),
        ({"hparams": TokenHParams(kl_gain=0.1), "kl_coefs": (0.1, 0.0)}, "hparams.kl_coef = 0: must be above 0"),
    ],
)
def test_bad_settings_are_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        RlhfExperiment(**changes)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("num_seed = 3", "num_seed: there is no such setting; did you mean 'num_seeds'"),
        ("[reward]\nsteps = 3", "reward.steps: there is no such setting; did you mean"),
        ("config = 3", "config = 3: must be a table"),
        ("[reference]\nnum_steps = 0", "reference.num_steps = 0: must be a positive integer"),
        ('[config]\ntask = "haiku"', "config.task = 'haiku': allowed: 'token-count', 'enum', 'names'"),
        ("[[", "not a TOML file"),
    ],
)
def test_bad_files_end_with_one_line_and_code_2(text, says, tmp_path, capsys):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    assert cli.main(["rlhf", str(path), "--out", str(tmp_path / "out"), "--no-compilation-cache"]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_missing_names_are_asked_for_and_nothing_is_begun(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("purejaxppo.use_all_cores", lambda: None)
    (tmp_path / "names.toml").write_text(NAMES)
    assert cli.main(["rlhf", str(tmp_path / "names.toml"), "--out", str(tmp_path / "out")]) == 2
    assert "pip install names" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.fixture
def on_two_devices(monkeypatch):
    """The command would give JAX its devices, which has started already."""
    monkeypatch.setattr("purejaxppo.use_all_cores", lambda: None)


def interrupted_after(num_segments):
    """`Runs` whose training is interrupted after so many segments."""

    class Interrupted(Runs):
        done = 0

        def advance(self, state, num_updates):
            if self.done == num_segments:
                raise KeyboardInterrupt
            self.done += 1
            return super().advance(state, num_updates)

    return Interrupted


@pytest.mark.slow
def test_the_command_leaves_its_directory_and_goes_on_where_it_was_stopped(tmp_path, on_two_devices, monkeypatch):
    path, out = tmp_path / "tiny.toml", tmp_path / "out"
    path.write_text(TINY)
    assert cli.main(["rlhf", str(path), "--out", str(out), "--no-compilation-cache"]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert [row["kl_coef"] for row in summary["settings"]] == [1.0, 0.5]
    assert len(summary["settings"][0]["score"]) == 2
    assert summary["settings"][0]["optimum"]["objective"] > np.mean(summary["settings"][0]["objective"]) - 0.2
    assert summary["diverged"] == {}
    assert "| before |" in (out / "samples.md").read_text()
    assert (out / "frontier.png").stat().st_size > 10_000
    with np.load(out / "metrics.npz") as metrics:
        assert metrics["score"].shape == (4, 3)
        whole = dict(metrics)
    again = tmp_path / "again"
    with monkeypatch.context() as patch:
        patch.setattr(rlhf, "CHECKPOINT_SECONDS", 0.0)
        patch.setattr(rlhf, "Runs", interrupted_after(1))
        assert cli.main(["rlhf", str(path), "--out", str(again), "--no-compilation-cache"]) == 130
    with np.load(again / "checkpoint.npz") as arrays:
        assert arrays["metrics/score"].shape == (4, 1)
    assert not (again / "summary.json").exists()
    assert cli.main(["rlhf", str(path), "--out", str(again), "--no-compilation-cache"]) == 0
    with np.load(again / "metrics.npz") as metrics:
        for name, value in whole.items():
            np.testing.assert_array_equal(metrics[name], value)
    assert cli.main(["rlhf", str(path), "--out", str(out), "--seed", "1"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", "dpo"])
def test_the_names_go_through_all_stages(tmp_path, on_two_devices, monkeypatch, algorithm):
    words = [a + b + c + "a" for a in "abl" for b in "nme" for c in "lor"] + ["ann", "lee", "mo"]
    monkeypatch.setattr(rlhf_stages, "load_names", lambda: words)
    path, out = tmp_path / "tiny.toml", tmp_path / "out"
    path.write_text(NAMES.replace('task = "names"', f'task = "names"\nalgorithm = "{algorithm}"'))
    assert cli.main(["rlhf", str(path), "--out", str(out), "--no-compilation-cache"]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert [(row["num_pairs"], row["kl_coef"]) for row in summary["settings"]] == [
        (8, 0.5),
        (8, 0.1),
        (32, 0.5),
        (32, 0.1),
    ]
    assert summary["stages"]["num_names"] == 30
    assert 0 <= summary["stages"]["equal_pairs"] <= 32
    assert abs(summary["reference"]["gold"]) < 0.2
    assert {row["num_pairs"] for row in summary["best_of_n"]} == {8, 32}


def test_flags_take_the_place_of_what_the_file_says(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    changed = rlhf.read(path, num_seeds=5, num_updates=7, seed=None)
    expected = rlhf_experiment.read(path)
    config = dataclasses.replace(expected.config, num_updates=7)
    assert changed == dataclasses.replace(expected, num_seeds=5, config=config)
