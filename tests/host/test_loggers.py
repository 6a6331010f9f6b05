"""Curves for TensorBoard and Weights & Biases, read back from what was written."""

import struct
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from purejaxppo.host import loggers
from purejaxppo.host.experiment import Experiment
from tests.helpers import tiny

NAN = np.nan
EXPERIMENT = Experiment(num_seeds=3, config=tiny())
BATCH = EXPERIMENT.config.batch_size


def metrics(offset=0.0):
    """Three runs, two updates."""
    return {
        "episode_return": np.array([[10, 20], [30, NAN], [50, 70]], np.float32) + offset,
        "num_episodes": np.array([[1, 3], [2, 0], [1, 1]], np.int32),
        "entropy": np.array([[0.1, 0.3], [0.2, 0.2], [0.5, 0.7]], np.float32) + offset,
        "eval_return": np.array([[NAN, 4], [NAN, 5], [NAN, 9]], np.float32) + offset,
    }


def test_a_point_is_the_mean_over_the_segment_and_returns_are_means_over_episodes():
    found = loggers.curves(metrics(), log_runs=2)
    assert set(found["entropy"]) == {"run-0", "run-1", "interquartile-mean", "quartile-25", "quartile-75"}
    assert found["episode_return"]["run-0"] == pytest.approx((10 + 3 * 20) / 4)
    assert found["episode_return"]["run-1"] == pytest.approx(30)
    assert found["entropy"]["run-0"] == pytest.approx(0.2)
    assert found["entropy"]["quartile-25"] == pytest.approx(0.2)
    assert found["entropy"]["quartile-75"] == pytest.approx(0.4)
    assert found["eval_return"]["interquartile-mean"] == pytest.approx(6)
    assert "run-2" not in found["entropy"], "the third run has no curve of its own, but counts"
    assert found["entropy"]["interquartile-mean"] == pytest.approx(1 / 3)


def test_what_is_not_known_has_no_point():
    values = metrics()
    values["num_episodes"][1] = 0
    values["eval_return"][:] = NAN
    found = loggers.curves(values, log_runs=16)
    assert set(found["episode_return"]) == {"run-0", "run-2"}
    assert found["eval_return"] == {}


def read_events(folder):
    """(step, tag) -> value of all event files of a folder; a record is length, its sum, content, its sum."""
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    found, purged = {}, []
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            if event.HasField("session_log"):
                purged.append(event.step)
            for value in event.summary.value:
                found[event.step, value.tag] = value.simple_value
    return found, purged


def test_tensorboard_has_a_folder_a_curve(tmp_path):
    pytest.importorskip("tensorboardX")
    with loggers.opened(["tensorboard"], tmp_path, EXPERIMENT, 2) as log:
        log(2, metrics())
        log(5, metrics(1.0))
    folders = {path.name for path in (tmp_path / "tensorboard").iterdir()}
    assert folders == {"run-0", "run-1", "interquartile-mean", "quartile-25", "quartile-75"}
    found, purged = read_events(tmp_path / "tensorboard" / "run-0")
    assert purged == []
    assert set(found) == {(n * BATCH, name) for n in (2, 5) for name in metrics()}
    assert found[2 * BATCH, "episode_return"] == pytest.approx(17.5)
    assert found[5 * BATCH, "episode_return"] == pytest.approx(18.5)
    together, _ = read_events(tmp_path / "tensorboard" / "interquartile-mean")
    assert together[5 * BATCH, "entropy"] == pytest.approx(4 / 3)


def test_a_resumed_run_writes_over_what_was_logged_beyond_its_checkpoint(tmp_path):
    pytest.importorskip("tensorboardX")
    with loggers.opened(["tensorboard"], tmp_path, EXPERIMENT, 1, done=3) as log:
        log(4, metrics())
    _, purged = read_events(tmp_path / "tensorboard" / "run-0")
    assert purged == [3 * BATCH + 1]


class FakeWandb(types.ModuleType):
    """Notes what is asked of it."""

    def __init__(self):
        super().__init__("wandb")
        self.inits, self.logged, self.finished, self.metrics = [], [], 0, []

    def Settings(self, **settings):
        return settings

    def init(self, **arguments):
        self.inits.append(arguments)
        return self

    def define_metric(self, *arguments, **options):
        self.metrics.append((arguments, options))

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.finished += 1


def test_wandb_gets_a_curve_for_each_run_and_one_run_however_often_it_is_resumed(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for done in (0, 2):
        with loggers.opened(["wandb"], tmp_path, EXPERIMENT, 2, done) as log:
            log(done + 2, metrics())
    assert fake.finished == 2
    first, second = fake.inits
    assert first["id"] == second["id"]
    assert first["resume"] == "allow"
    assert first["config"]["config"]["num_envs"] == EXPERIMENT.config.num_envs
    assert Path(first["dir"]) == tmp_path
    assert fake.metrics[0] == (("*",), {"step_metric": "steps"})
    assert [values["steps"] for values in fake.logged] == [2 * BATCH, 4 * BATCH]
    assert fake.logged[0]["episode_return/run-0"] == pytest.approx(17.5)
    assert fake.logged[0]["entropy/interquartile-mean"] == pytest.approx(1 / 3)
    assert "entropy/run-2" not in fake.logged[0]


def test_wandb_that_cannot_begin_is_one_line(tmp_path, monkeypatch):
    fake = FakeWandb()
    fake.init = lambda **_: (_ for _ in ()).throw(RuntimeError("no API key\nconfigured"))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with (
        pytest.raises(ValueError, match=r"^log = 'wandb': no API key configured; or set WANDB_MODE=offline$"),
        loggers.opened(["wandb"], tmp_path, EXPERIMENT, 2),
    ):
        pass


@pytest.mark.slow
def test_wandb_itself_works_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with loggers.opened(["wandb"], tmp_path, EXPERIMENT, 2) as log:
        log(2, metrics())
    (kept,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert kept.stat().st_size > 0


def test_no_logger_writes_nothing(tmp_path):
    with loggers.opened([], tmp_path, EXPERIMENT, 16) as log:
        log(2, metrics())
    assert list(tmp_path.iterdir()) == []


def test_a_logger_that_there_is_not_or_that_is_not_installed_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"^log = 'mlflow': allowed: 'tensorboard', 'wandb'$"):
        loggers.check(["mlflow"])
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"^log = 'wandb': is not installed; pip install 'purejaxppo\[wandb\]'$"):
        loggers.check(["wandb"])
