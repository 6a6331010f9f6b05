"""Experiment files: read, written, refused."""

import math
from pathlib import Path

import pytest

from purejaxppo import Config, HParams
from purejaxppo.host import experiment as experiments
from purejaxppo.host.experiment import Experiment

OF_RLHF = ("rlhf-", "grpo-", "dpo-")  # which tests/tokens/test_command.py reads
CONFIGS = sorted(
    path for path in (Path(__file__).parents[2] / "configs").glob("*.toml") if not path.name.startswith(OF_RLHF)
)


def written(tmp_path, text):
    path = tmp_path / "experiment.toml"
    path.write_text(text)
    return path


def test_a_written_experiment_reads_back_equal(tmp_path):
    experiment = Experiment(
        num_seeds=3,
        seed=7,
        config=Config(env="Catch-bsuite", env_params={"rows": 8}, hidden_sizes=(32,), kl_early_stopping=True),
        hparams=HParams(learning_rate=3e-4, clip_eps=math.inf, target_kl=0.01),
    )
    assert experiments.read(written(tmp_path, experiments.to_toml(experiment))) == experiment


def test_defaults_stand_where_a_file_says_nothing(tmp_path):
    assert experiments.read(written(tmp_path, "")) == Experiment()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[config]\nnum_env = 4", "config.num_env: there is no such setting; did you mean 'num_envs'?"),
        ("[hparams]\nlearning_rat = 1.0", "did you mean 'learning_rate'?"),
        ("num_seed = 4", "did you mean 'num_seeds'?"),
        ("num_seeds = 0", "num_seeds = 0"),
        ("num_seeds = 1.5", "num_seeds = 1.5"),
        ("seed = -1", "seed = -1"),
        ("config = 3", "config = 3"),
        ("[config]\nnum_envs = 0", "config.num_envs = 0"),
        ("[config]\ntotal_timesteps = 5e5", "config.total_timesteps = 500000.0"),
        ("[hparams]\ngamma = 'high'", "hparams.gamma = 'high'"),
        ("[hparams]\ngamma = true", "hparams.gamma = True"),
        ("[config", "not a TOML file"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path, text, named):
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        experiments.read(written(tmp_path, text))
    assert named in str(refused.value)


def test_an_unreadable_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        experiments.read(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not a TOML file"):
        experiments.read(tmp_path / "binary.toml")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_is_valid_and_headed_by_its_command(path):
    experiments.read(path)
    assert path.read_text().splitlines()[0] == f"# purejaxppo train configs/{path.name}"
