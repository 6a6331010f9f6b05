"""`train` and `resume` as a person meets them: stopped, killed, full disks, and what comes out all the same."""

import contextlib
import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from purejaxppo import devices, segments
from purejaxppo.host import checkpoints, cli, experiment, resuming, training

SMALL = """
num_seeds = 3
eval_every = 3
eval_episodes = 2
[config]
total_timesteps = 512
num_steps = 16
hidden_sizes = [8]
kl_early_stopping = true
normalize_observations = true
normalize_rewards = true
[hparams]
learning_rate = 1e-2
target_kl = 0.01
"""
NUM_UPDATES = 8


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Every program is compiled once, quickly, for the devices that the tests began with; an update is a segment."""
    compiled, compile_programs = {}, segments.compile_programs

    def once(*what):
        if what not in compiled:
            compiled[what] = compile_programs(*what)
        return compiled[what]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "compiler_options", lambda mesh: {"xla_backend_optimization_level": "0"})
        patch.setattr(segments, "compile_programs", once)
        patch.setattr(segments, "SEGMENT_SECONDS", 0.0)
        patch.setattr("purejaxppo.use_all_cores", lambda at_least=1: None)
        yield


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("configs") / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory):
    """A run that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert cli.main(["train", str(small), "--out", str(out)]) == 0
    return out


@pytest.fixture
def finished(whole, tmp_path):
    """A copy of it, to do things to."""
    return Path(shutil.copytree(whole, tmp_path / "finished"))


def run(*arguments, code, capsys):
    assert cli.main([str(argument) for argument in arguments]) == code
    return capsys.readouterr()


@pytest.fixture
def interrupt(monkeypatch):
    """(number of segments, what then happens): the next training is interrupted by it."""
    advance = segments.advance

    def after(count, happens):
        seen = []

        def counted(*args):
            seen.append(None)
            if len(seen) == count:
                happens()
            return advance(*args)

        monkeypatch.setattr(segments, "advance", counted)

    return after


def content(directory):
    """Everything that a finished run left which must not depend on how it came there."""
    with np.load(directory / "metrics.npz") as arrays:
        metrics = {name: array.tobytes() for name, array in arrays.items()}
    found, notes = checkpoints.find(directory)
    assert notes == []
    assert found.update_index == NUM_UPDATES
    state = {name: leaf.tobytes() for name, leaf in checkpoints.read(found).state.items()}
    return metrics, state, (directory / "config.toml").read_text()


def die():
    raise RuntimeError("killed")


# Interrupted and gone on with


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_training_after_the_segment_and_resume_is_bitwise(
    number, code, small, whole, tmp_path, capsys, interrupt
):
    out, handler = tmp_path / "out", signal.getsignal(number)
    interrupt(4, lambda: os.kill(os.getpid(), number))
    errors = run("train", small, "--out", out, "--keep", 1, code=code, capsys=capsys).err
    assert "stopped after update 4 of 8; the last checkpoint is of update 4" in errors
    assert errors.splitlines()[-1].endswith(f"to go on: purejaxppo resume {out} --keep 1")
    assert checkpoints.indices(out)[-1] == 4
    assert not (out / "metrics.npz").exists()
    assert signal.getsignal(number) is handler

    interrupt(99, die)
    run("resume", out, code=0, capsys=capsys)
    assert content(out) == content(whole)


@pytest.mark.parametrize("count", [2, 5, 8])
def test_a_run_that_died_goes_on_from_its_last_checkpoint(count, small, whole, tmp_path, capsys, interrupt):
    out = tmp_path / "out"
    interrupt(count, die)
    with pytest.raises(RuntimeError, match="killed"):
        cli.main(["train", str(small), "--out", str(out), "--checkpoint-every", "0"])
    interrupt(99, die)
    run("resume", out, code=0, capsys=capsys)
    assert content(out) == content(whole)
    assert (
        json.loads((out / "summary.json").read_text())["final_return"]
        == (json.loads((whole / "summary.json").read_text())["final_return"])
    )


def test_a_run_that_died_before_its_first_checkpoint_starts_again(small, whole, tmp_path, capsys, interrupt):
    out = tmp_path / "out"
    interrupt(1, die)
    with pytest.raises(RuntimeError, match="killed"):
        cli.main(["train", str(small), "--out", str(out)])
    assert [path.name for path in out.iterdir()] == ["config.toml"]
    interrupt(99, die)
    assert "start again from their beginning" in run("resume", out, code=0, capsys=capsys).err
    assert content(out) == content(whole)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("lost", [False, True], ids=["raised", "lost in a callback"])
def test_a_signal_before_the_first_segment_ends_the_command_at_once(
    lost, number, code, small, tmp_path, capsys, monkeypatch
):
    compile_programs, out = segments.compile_programs, tmp_path / "out"

    def interrupted(*args):
        with contextlib.suppress(KeyboardInterrupt) if lost else contextlib.nullcontext():
            os.kill(os.getpid(), number)
        return compile_programs(*args)

    monkeypatch.setattr(segments, "compile_programs", interrupted)
    errors = run("train", small, "--out", out, code=code, capsys=capsys).err
    assert "stopped at once; there is no checkpoint yet; to go on: purejaxppo resume" in errors


def test_a_second_signal_does_not_wait_for_the_segment(small, tmp_path, capsys, interrupt):
    out = tmp_path / "out"

    def twice():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

    interrupt(4, twice)
    errors = run("train", small, "--out", out, "--checkpoint-every", 0, code=143, capsys=capsys).err
    assert "stopped at once; the last checkpoint is of update 3; to go on" in errors


def test_a_run_that_died_before_its_files_were_written_needs_no_more_training(finished, whole, capsys, interrupt):
    interrupt(1, die)
    (finished / "metrics.npz").unlink()
    (finished / "summary.json").unlink()
    run("resume", finished, code=0, capsys=capsys)
    assert content(finished) == content(whole)


def test_a_damaged_checkpoint_is_passed_over_with_a_note(small, whole, tmp_path, capsys, interrupt):
    out = tmp_path / "out"
    interrupt(6, die)
    with pytest.raises(RuntimeError, match="killed"):
        cli.main(["train", str(small), "--out", str(out), "--checkpoint-every", "0", "--keep", "9"])
    assert checkpoints.indices(out) == [1, 2, 3, 4, 5]
    path = next(iter((out / "checkpoints" / "0000005" / "state").rglob("d/*")))
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    interrupt(99, die)
    errors = run("resume", out, "--keep", 9, code=0, capsys=capsys).err
    assert "0000005 is damaged" in errors
    assert content(out) == content(whole)


def test_checkpoints_and_evaluations_change_no_number_of_training(small, whole, tmp_path, capsys):
    out = tmp_path / "out"
    run("train", small, "--out", out, "--eval-every", 0, "--eval-episodes", 32, code=0, capsys=capsys)
    metrics, state, _ = content(whole)
    plain, same_state, _ = content(out)
    assert set(metrics) - set(plain) == {"eval_return"}
    assert plain == {name: metrics[name] for name in plain}
    assert same_state == state


def test_evaluations_are_where_they_were_asked_for_and_at_the_end(whole):
    with np.load(whole / "metrics.npz") as arrays:
        known = ~np.isnan(arrays["eval_return"])
    assert known.shape == (3, NUM_UPDATES)
    assert (known == np.isin(np.arange(1, NUM_UPDATES + 1), [3, 6, 8])).all()


# Further than it was meant to go


@pytest.mark.slow
def test_a_larger_total_goes_on_and_says_what_the_learning_rate_does(finished, whole, capsys):
    errors = run("resume", finished, "--config.total-timesteps", 1024, code=0, capsys=capsys).err
    assert "extended from 512 to 1,024 steps per run" in errors
    assert "goes on from 0.005 where it had come to 0" in errors
    with np.load(finished / "metrics.npz") as longer, np.load(whole / "metrics.npz") as before:
        for name in before:
            np.testing.assert_array_equal(longer[name][:, :NUM_UPDATES], before[name], err_msg=name)
        rates = 1e-2 * (1 - np.arange(NUM_UPDATES, 2 * NUM_UPDATES) / (2 * NUM_UPDATES))
        np.testing.assert_allclose(longer["learning_rate"][:, NUM_UPDATES:], np.tile(rates, (3, 1)), rtol=1e-5)
    assert experiment.read(finished / "config.toml").config.total_timesteps == 1024
    assert "is finished" in run("resume", finished, code=0, capsys=capsys).out


# Refusals


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--config.num-envs", 2, "--hparams.gamma", 0.5), "other settings: config.num_envs, hparams.gamma"),
        (("--num-seeds", 4, "--seed", 1), "other settings: num_seeds, seed"),
        (("--eval-every", 4), "other settings: eval_every"),
        (("--config.total-timesteps", 256), "other settings: config.total_timesteps"),
        (("--out", "elsewhere"), "--out elsewhere: a resumed run stays in its directory"),
        (("--keep", 0), "keep = 0: must be a positive integer"),
        (("--checkpoint-every", -1), "checkpoint_every = -1: must be seconds, 0 or more"),
    ],
    ids=lambda flags: " ".join(map(str, flags)) if isinstance(flags, tuple) else "",
)
def test_other_settings_are_refused_by_their_names(flags, named, finished, whole, capsys):
    errors = run("resume", finished, *flags, code=2, capsys=capsys).err
    assert named in errors
    assert errors.count("\n") == 1
    assert content(finished) == content(whole)


def test_a_checkpoint_of_another_config_is_refused_by_the_fields_that_differ(finished, capsys):
    path = finished / "config.toml"
    path.write_text(path.read_text().replace("num_epochs = 4", "num_epochs = 3"))
    assert "other settings: config.num_epochs;" in run("resume", finished, code=2, capsys=capsys).err


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (lambda path: None, "there is no such directory"),
        (lambda path: path.mkdir(), "holds no training run (no config.toml)"),
        (lambda path: (path.mkdir(), (path / "notes.txt").touch()), "holds no training run (no config.toml)"),
        (lambda path: (path.mkdir(), (path / "plan.toml").touch()), "holds a sweep"),
        (lambda path: (path.mkdir(), (path / "config.toml").write_text("tool = 1")), "there is no such setting"),
    ],
    ids=["missing", "empty", "foreign", "sweep", "other config.toml"],
)
def test_a_directory_without_a_run_is_refused(prepare, said, tmp_path, capsys):
    prepare(tmp_path / "dir")
    before = sorted(tmp_path.rglob("*"))
    errors = run("resume", tmp_path / "dir", code=2, capsys=capsys).err
    assert said in errors
    assert errors.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_directory_is_held_by_one_process(finished, capsys):
    with resuming.held(finished):
        assert "another process is training in it" in run("resume", finished, code=2, capsys=capsys).err


def test_runs_of_more_devices_than_there_are_are_refused(finished, capsys):
    for path in finished.glob("checkpoints/*"):
        about = json.loads((path / "about.json").read_text())
        about["shape"]["num_devices"] = 64
        (path / "about.json").write_text(json.dumps(about))
        (path / "SHA256SUMS").write_bytes(checkpoints._sums(path))
    (finished / "summary.json").unlink()
    assert "lay on 64 devices, of which there are 2" in run("resume", finished, code=2, capsys=capsys).err


def test_another_version_is_said(finished, capsys):
    for path in finished.glob("checkpoints/*"):
        about = json.loads((path / "about.json").read_text())
        about["versions"]["jax"] = "0.1"
        (path / "about.json").write_text(json.dumps(about))
        (path / "SHA256SUMS").write_bytes(checkpoints._sums(path))
    errors = run("resume", finished, code=0, capsys=capsys).err
    assert re.search(r"other versions than before \(jax 0\.1 -> [\d.]+\)", errors)


# Disks


@pytest.fixture
def tmpfs(tmp_path):
    """(its options) -> a file system of its own."""
    mounted = []

    def mount(options):
        path = tmp_path / "tmpfs"
        path.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True).returncode:
            pytest.skip("needs the right to mount a file system")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", path], check=True)


@pytest.mark.parametrize("noticed", ["before writing", "while writing"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of orbax's threads
def test_a_full_disk_ends_training_cleanly_and_the_last_good_checkpoint_stays(
    noticed, small, whole, tmpfs, capsys, interrupt, monkeypatch
):
    if noticed == "while writing":
        monkeypatch.setattr(checkpoints, "_check_room", lambda *_: None)
    disk = tmpfs("size=1m")
    out = disk / "out"
    interrupt(4, lambda: (disk / "film").write_bytes(bytes(shutil.disk_usage(disk).free - 8192)))
    errors = run("train", small, "--out", out, "--checkpoint-every", 0, code=1, capsys=capsys).err
    assert f"{out}: cannot be written to (" in errors
    assert os.strerror(errno.ENOSPC) in errors
    assert "the last checkpoint is of update 3" in errors
    assert checkpoints.find(out)[0].update_index == 3
    if noticed == "before writing":  # orbax's threads may make files again after all was tidied
        assert not list(out.rglob(".partial*"))

    (disk / "film").unlink()
    interrupt(99, die)
    run("resume", out, "--keep", 1, code=0, capsys=capsys)
    assert content(out) == content(whole)


def test_a_directory_that_cannot_be_written_to_is_refused(finished, small, tmpfs, capsys):
    disk = tmpfs("size=4m")
    shutil.copytree(finished, disk / "out")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    for command in (("resume", disk / "out"), ("train", small, "--out", disk / "new"), ("train", small, "--out", disk)):
        errors = run(*command, code=2, capsys=capsys).err
        assert re.search("cannot be (written to|made)", errors), command
        assert errors.count("\n") == 1


# Pace


def test_a_checkpoint_that_takes_long_is_written_less_often(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = training.Clock(60)
    now[0] += 59
    assert not clock.due()
    now[0] += 1
    assert clock.due()
    with clock:
        now[0] += 3
    now[0] += 149
    assert not clock.due()
    now[0] += 1
    assert clock.due()


def test_options_are_said_as_flags():
    assert training.Options().flags() == []
    options = training.Options(checkpoint_every=2.5, keep=7, log=("tensorboard",), log_runs=3)
    assert options.flags() == ["--checkpoint-every 2.5", "--keep 7", "--log tensorboard", "--log-runs 3"]


# Killed, in processes of their own


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_ten_random_moments_and_resumed_each_time(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    config = Path(__file__).parents[2] / "configs" / "cartpole.toml"
    settings = "--config.total-timesteps 300000 --config.kl-early-stopping --hparams.target-kl 0.01 --eval-every 100"
    settings = [*settings.split(), "--eval-episodes", "8"]

    def start(*arguments):
        command = [sys.executable, "-m", "purejaxppo.host.cli", *map(str, arguments)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    assert start("train", config, *settings, "--out", tmp_path / "whole").wait() == 0
    out = tmp_path / "out"
    begin = ("train", config, *settings, "--out", out, "--checkpoint-every", "0")
    resume = ("resume", out, "--checkpoint-every", "0")
    generator, updates, code = random.Random(0), [], None
    for _ in range(10):
        process = start(*(resume if (out / "config.toml").exists() else begin))
        before = max(checkpoints.indices(out), default=0)
        deadline = time.monotonic() + 90
        while max(checkpoints.indices(out), default=0) <= before and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(generator.uniform(0, 1.0))
        process.kill()
        code = process.wait()
        updates.append(max(checkpoints.indices(out)))
    assert code == -signal.SIGKILL, "the run was over before the tenth kill"
    assert start(*resume).wait() == 0
    assert len(set(updates)) == 10, updates
    with np.load(out / "metrics.npz") as arrays, np.load(tmp_path / "whole" / "metrics.npz") as expected:
        assert set(arrays) == set(expected)
        for name in expected:
            assert arrays[name].tobytes() == expected[name].tobytes(), name
    states = [checkpoints.read(checkpoints.find(path)[0]).state for path in (out, tmp_path / "whole")]
    assert {name: leaf.tobytes() for name, leaf in states[0].items()} == {
        name: leaf.tobytes() for name, leaf in states[1].items()
    }


# Looked at afterwards


def test_every_finished_run_is_evaluated_and_the_table_says_so(finished, whole, capsys, monkeypatch):
    printed = run("evaluate", finished, "--num-episodes", 4, "--seed", 3, code=0, capsys=capsys).out
    report = json.loads((finished / "evaluation.json").read_text())
    assert (report["update_index"], report["num_episodes"], report["seed"]) == (NUM_UPDATES, 4, 3)
    found, _ = checkpoints.find(finished)
    chunk = training.chunk_of(training.plan_of(found.experiment), found)
    state = checkpoints.unflatten(checkpoints.read(found).state, segments.state_shapes(chunk))
    for name, deterministic in (("deterministic", True), ("sampled", False)):
        episodes = segments.evaluate_all(chunk, state, 3, 4, deterministic)
        np.testing.assert_allclose(report[name]["per_run"], episodes.episode_return.mean(1), rtol=1e-6)
        np.testing.assert_allclose(report[name]["interquartile_mean"], np.mean(report[name]["per_run"]), rtol=1e-6)
        assert name in printed
    assert content(finished) == content(whole)


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (("evaluate",), "must be followed by a run directory"),
        (("evaluate", "none"), "holds no checkpoint"),
        (("evaluate", "DIR", "--num-episodes", 0), "num_episodes = 0"),
        (("evaluate", "DIR", "--checkpoint", "5"), "checkpoint = '5'"),
        (("render", "DIR"), "must be followed by the path of a GIF"),
        (("render", "DIR", "out.gif", "--run", 99), "run = '99': must be 'best' or one of the 3 runs, 0 to 2"),
        (("render", "none", "out.gif"), "cannot be read"),
        (("resume",), "must be followed by a run directory"),
        (("train", "DIR/config.toml", "--log", "mlflow"), "log = 'mlflow': allowed: 'tensorboard', 'wandb'"),
        (("train", "DIR/config.toml", "--eval-every", 0), "eval_episodes = 2: is read only with eval_every > 0"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_bad_commands_are_one_line(command, named, finished, capsys):
    errors = run(*(str(part).replace("DIR", str(finished)) for part in command), code=2, capsys=capsys).err
    assert named in errors
    assert errors.count("\n") == 1
