"""Checkpoints: read as they were written, or passed over."""

import json
import shutil

import jax
import numpy as np
import pytest

import purejaxppo as ppo
from purejaxppo.host import checkpoints
from purejaxppo.host.checkpoints import Checkpoint
from purejaxppo.host.experiment import Experiment
from purejaxppo.plan import Shape
from purejaxppo.types import Metrics
from tests.helpers import tiny

NUM_RUNS = 2


def checkpoint(update_index, score=1.0):
    rng = np.random.default_rng(update_index)
    state = {
        "params/params/actor_head/bias": rng.normal(size=(NUM_RUNS, 3)).astype(np.float32),
        "key": rng.integers(0, 2**32, (NUM_RUNS, 2), np.uint32),
        "env_state/done": np.array([True, False]),
        "env_state/nothing": np.zeros((NUM_RUNS, 0), np.int32),
        "obs": np.array([[np.nan], [-0.0]], np.float32),
    }
    metrics = {name: np.full((NUM_RUNS, update_index), score, np.float32) for name in Metrics._fields}
    experiment = Experiment(num_seeds=NUM_RUNS, config=tiny(), hparams=ppo.HParams(gamma=0.5))
    return Checkpoint(experiment, update_index, state, metrics, Shape(2, 1, 1), {"name": "CartPole-v1"}, 1.5)


@pytest.fixture
def directory(tmp_path):
    for update_index in (1, 2):
        checkpoints.write(tmp_path, checkpoint(update_index), keep=5)
    return tmp_path


def last(directory):
    found, notes = checkpoints.find(directory)
    return found.update_index, notes


def test_what_is_read_is_what_was_written_bitwise(directory):
    found, notes = checkpoints.find(directory)
    content, expected = checkpoints.read(found), checkpoint(2)
    assert notes == []
    for read, written in ((content.state, expected.state), (content.metrics, expected.metrics)):
        for name, leaf in written.items():
            if leaf.size:
                assert (read[name].dtype, read[name].tobytes()) == (leaf.dtype, leaf.tobytes()), name
    assert content._replace(state={}, metrics={}) == expected._replace(state={}, metrics={})


def files_of(directory):
    return sorted(path for path in (directory / "checkpoints" / "0000002").rglob("*") if path.is_file())


def test_any_flipped_byte_and_any_truncation_is_noticed(directory):
    files = files_of(directory)
    assert {"SHA256SUMS", "about.json", "config.toml", "metrics.npz"} < {path.name for path in files}
    assert len(files) >= 8
    rng = np.random.default_rng(0)
    for path in files:
        content = path.read_bytes()
        flipped = bytearray(content or b"x")
        flipped[rng.integers(len(flipped))] ^= 1 << int(rng.integers(8))
        for damaged in (flipped, content[: len(content) // 2], content + b"\n", b""):
            if damaged == content:
                continue
            path.write_bytes(damaged)
            update_index, notes = last(directory)
            assert update_index == 1, path
            assert len(notes) == 1
            assert "0000002 is damaged" in notes[0]
            path.write_bytes(content)
        path.unlink()
        assert last(directory)[0] == 1, path
        path.write_bytes(content)
    assert last(directory) == (2, [])


def test_sums_that_were_cut_at_a_line_are_noticed(directory):
    sums = directory / "checkpoints" / "0000002" / "SHA256SUMS"
    sums.write_text("".join(sums.read_text().splitlines(keepends=True)[:-1]))
    assert last(directory)[0] == 1


def test_with_no_intact_checkpoint_there_is_none(directory):
    for path in directory.glob("checkpoints/*/about.json"):
        path.write_text("{}")
    found, notes = checkpoints.find(directory)
    assert found is None
    assert len(notes) == 2
    assert checkpoints.find(directory / "elsewhere") == (None, [])


def test_a_half_written_checkpoint_is_none_and_is_cleaned_away(directory):
    shutil.copytree(directory / "checkpoints" / "0000002", directory / "checkpoints" / ".partial-0000003")
    assert last(directory) == (2, [])
    checkpoints.clean(directory, 1)
    assert [path.name for path in (directory / "checkpoints").iterdir()] == ["0000001"]


def test_the_last_ones_and_the_best_by_return_are_kept(tmp_path):
    for update_index, score in enumerate([0.0, 3.0, 7.0, 7.0, 5.0, 1.0, 2.0]):
        checkpoints.write(tmp_path, checkpoint(update_index, score), keep=2)
        kept = checkpoints.indices(tmp_path)
        assert kept[-2:] == [max(0, update_index - 1), update_index][-len(kept) :]
    assert checkpoints.indices(tmp_path) == [2, 5, 6]
    assert checkpoints.best(tmp_path) == 2
    assert checkpoints.find(tmp_path, "best")[0].update_index == 2
    assert checkpoints.find(tmp_path, 5)[0].update_index == 5
    with pytest.raises(ValueError, match=r"^checkpoint = 4: must be 'last', 'best' or one that .* holds: 2, 5, 6$"):
        checkpoints.find(tmp_path, 4)


def test_a_return_that_nobody_knows_yet_is_not_the_best(tmp_path):
    for update_index, score in ((0, 0.0), (1, np.nan), (2, 1.0), (3, np.nan)):
        checkpoints.write(tmp_path, checkpoint(update_index, score), keep=1)
    assert checkpoints.indices(tmp_path) == [2, 3]
    assert json.loads((tmp_path / "checkpoints" / "0000003" / "about.json").read_text())["score"] is None


def test_a_checkpoint_that_is_there_is_replaced(directory):
    checkpoints.write(directory, checkpoint(2, score=9.0), keep=5)
    content = checkpoints.read(checkpoints.find(directory)[0])
    assert (content.metrics["episode_return"] == 9).all()


def test_a_failed_write_leaves_those_before_it(directory, monkeypatch):
    def full(path, state):
        (path.parent / "half").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "_write_state", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.write(directory, checkpoint(3), keep=1)
    assert sorted(path.name for path in (directory / "checkpoints").iterdir()) == ["0000001", "0000002"]


def test_leaves_have_the_names_of_their_places():
    config = tiny(hidden_sizes=(3,))
    state = jax.eval_shape(lambda: ppo.init(config, ppo.HParams(), jax.random.key(0)))
    names = checkpoints.flatten(state)
    assert "params/params/actor_head/bias" in names
    assert len(names) == len(jax.tree.leaves(state))


def test_a_state_of_other_shapes_is_refused():
    shapes = ppo.HParams(*(jax.ShapeDtypeStruct((2,), np.float32) for _ in ppo.HParams._fields))
    state = {name: np.zeros(2, np.float32) for name in ppo.HParams._fields}
    with pytest.raises(ValueError, match=r"^gamma should be \(2,\) float32 and is missing$"):
        checkpoints.unflatten({name: leaf for name, leaf in state.items() if name != "gamma"}, shapes)
    with pytest.raises(ValueError, match=r"^gamma should be \(2,\) float32 and is \(\(3,\), dtype\('float32'\)\)$"):
        checkpoints.unflatten(state | {"gamma": np.zeros(3, np.float32)}, shapes)
