"""Checkpoints of a training run: each is a directory of its own that holds all the run needs to go on.

    checkpoints/0000488/    what the run was after 488 updates
      state/                the TrainState of all runs, written by orbax
      metrics.npz           of all updates so far
      config.toml           the settings
      about.json            how the runs lay on the devices, versions, spaces of the environment
      SHA256SUMS            of all of these, written last

A checkpoint takes its name only when it is complete, and one that was damaged afterwards is known by its sums: whatever
happens to a process or a disk, what is read is a checkpoint as it was written, or the one before it.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from purejaxppo import results
from purejaxppo.host import experiment as experiments
from purejaxppo.host import files
from purejaxppo.host.experiment import Experiment
from purejaxppo.plan import Shape
from purejaxppo.types import Metrics, TrainState

FOLDER = "checkpoints"
SUMS = "SHA256SUMS"
PARTIAL = ".partial-"
ROOM = 2**17  # bytes of a checkpoint besides its arrays


class Checkpoint(NamedTuple):
    """A training run after some updates."""

    experiment: Experiment
    update_index: int  # updates done
    state: dict[str, np.ndarray]  # leaves [n, ...] of the TrainState by their paths; of keys, their data
    metrics: dict[str, np.ndarray]  # [n, update_index]: Metrics, and eval_return if the run has evaluations
    shape: Shape  # how the runs lie on the devices
    spaces: dict[str, Any]  # of the environment, as a policy needs them
    run_seconds: float  # of training so far


class Found(NamedTuple):
    """An intact checkpoint, of which only the small files have been read."""

    path: Path
    experiment: Experiment
    about: dict[str, Any]

    @property
    def update_index(self) -> int:
        """Updates done."""
        return int(self.about["update_index"])

    @property
    def shape(self) -> Shape:
        """How the runs lay on the devices."""
        return Shape(**self.about["shape"])


def write(directory: Path, checkpoint: Checkpoint, keep: int) -> None:
    """Writes a checkpoint of the run in `directory`, and then drops all but the last `keep` and the best by return.

    Raises:
      OSError: when it cannot be written; the checkpoints that there were stay.
    """
    path = _path(directory, checkpoint.update_index)
    partial = path.with_name(PARTIAL + path.name)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _check_room(partial, checkpoint)
        _write_state(partial / "state", checkpoint.state)
        with (partial / "metrics.npz").open("wb") as file:
            np.savez(file, **checkpoint.metrics)  # type: ignore[arg-type]
        (partial / "config.toml").write_text(experiments.to_toml(checkpoint.experiment))
        (partial / "about.json").write_text(json.dumps(_about(checkpoint), indent=2))
        (partial / SUMS).write_bytes(_sums(partial))
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _drop(path)  # one that is there is damaged: the run went on from an earlier one
    partial.rename(path)
    kept = indices(directory)
    for index in set(kept) - set(kept[-keep:]) - {best(directory)}:
        _drop(_path(directory, index))


def find(directory: Path, which: str | int = "last") -> tuple[Found | None, list[str]]:
    """The newest intact checkpoint of the run in `directory`, or the best one.

    Args:
      directory: of the run.
      which: "last", "best" (by return; of those that are kept), or a number of updates.

    Returns:
      The checkpoint, None if there is no intact one; and a note on each damaged one that was passed over.

    Raises:
      ValueError: for a `which` that there is not.
    """
    candidates = list(reversed(indices(directory)))
    if which == "best":
        candidates.sort(key=lambda index: index == best(directory), reverse=True)
    elif which != "last":
        if str(which) not in map(str, candidates):
            kept = ", ".join(map(str, reversed(candidates))) or "none"
            raise ValueError(f"checkpoint = {which!r}: must be 'last', 'best' or one that {directory} holds: {kept}")
        candidates = [int(which)]
    notes: list[str] = []
    for index in candidates:
        path = _path(directory, index)
        try:
            if (path / SUMS).read_bytes() != _sums(path):
                raise ValueError("its files are not as they were written")
            about = json.loads((path / "about.json").read_text())
            return Found(path, experiments.read(path / "config.toml"), about), notes
        except (OSError, ValueError) as error:
            notes.append(f"{path} is damaged ({error}) and is passed over")
    return None, notes


def read(found: Found) -> Checkpoint:
    """All of a checkpoint. Starts JAX."""
    with np.load(found.path / "metrics.npz") as arrays:
        metrics = dict(arrays)
    about = found.about
    state = _read_state(found.path / "state")
    return Checkpoint(
        found.experiment, found.update_index, state, metrics, found.shape, about["spaces"], about["run_seconds"]
    )


def indices(directory: Path) -> list[int]:
    """The updates after which there are checkpoints, ascending."""
    return sorted(int(path.name) for path in (directory / FOLDER).glob("*") if path.name.isdigit())


def best(directory: Path) -> int | None:
    """The checkpoint with the highest return, the earliest of equal ones; None if no episode has ended yet."""
    scores = {}
    for index in indices(directory):
        try:
            score = json.loads((_path(directory, index) / "about.json").read_text())["score"]
        except (OSError, ValueError, KeyError):
            continue
        if score is not None:
            scores[index] = score
    return max(scores, key=lambda index: scores[index]) if scores else None


def clean(directory: Path, update_index: int) -> None:
    """Drops what a killed process left half written, and damaged checkpoints beyond the one that is gone on from."""
    for left in (directory / FOLDER).glob(f"{PARTIAL}*"):
        shutil.rmtree(left)
    for index in indices(directory):
        if index > update_index:
            _drop(_path(directory, index))


def flatten(state: TrainState) -> dict[str, Any]:
    """The leaves by their paths, such as `params/params/actor_head/bias`."""
    leaves, _ = jax.tree.flatten_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def unflatten(state: Mapping[str, np.ndarray], shapes: TrainState) -> TrainState:
    """The TrainState of leaves that `flatten` made.

    Raises:
      ValueError: when they are not those of a run with these shapes.
    """
    expected = flatten(shapes)
    found = {name: (leaf.shape, leaf.dtype) for name, leaf in state.items()}
    for name, leaf in expected.items():
        if leaf.size and found.get(name) != (leaf.shape, leaf.dtype):
            raise ValueError(f"{name} should be {leaf.shape} {leaf.dtype} and is {found.get(name, 'missing')}")
    leaves = [state[name] if leaf.size else np.zeros(leaf.shape, leaf.dtype) for name, leaf in expected.items()]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def split_metrics(arrays: Mapping[str, np.ndarray]) -> Metrics:
    """The metrics of training alone."""
    return Metrics(*(arrays[name] for name in Metrics._fields))  # type: ignore[arg-type]


def _about(checkpoint: Checkpoint) -> dict[str, Any]:
    score = None
    if checkpoint.update_index:
        score = float(results.interquartile_mean(results.final_return(split_metrics(checkpoint.metrics))))
    return {
        "update_index": checkpoint.update_index,
        "score": files.plain(score),
        "run_seconds": checkpoint.run_seconds,
        "shape": checkpoint.shape._asdict(),
        "spaces": checkpoint.spaces,
        "platform": jax.default_backend(),
        "machine": files.machine(),
        "versions": files.versions(),
    }


def _check_room(path: Path, checkpoint: Checkpoint) -> None:
    """Raises OSError when the disk is all but full: orbax would say so as well, but at length, from its threads."""
    leaves = [*checkpoint.state.values(), *checkpoint.metrics.values()]
    if shutil.disk_usage(path).free < ROOM + sum(leaf.nbytes for leaf in leaves):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _write_state(path: Path, state: Mapping[str, np.ndarray]) -> None:
    import orbax.checkpoint as ocp  # half a second, which no other command should wait for

    logging.getLogger("absl").setLevel(logging.CRITICAL)  # what goes wrong is raised as well
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(path.absolute(), {name: leaf for name, leaf in state.items() if leaf.size})
    except OSError:
        raise
    except Exception as error:  # of whichever kind its storage library makes of a full disk
        full = "No space left" in str(error)
        reason = os.strerror(errno.ENOSPC) if full else " ".join(str(error).split())[:200]
        raise OSError(errno.ENOSPC if full else errno.EIO, reason, str(path)) from error


def _read_state(path: Path) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.CRITICAL)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return {name: np.asarray(leaf) for name, leaf in checkpointer.restore(path.absolute()).items()}


def _sums(path: Path) -> bytes:
    """The sum and name of every file of a checkpoint, a line each, as `sha256sum` writes them."""
    return "".join(f"{_sum(file)}  {file.relative_to(path).as_posix()}\n" for file in _contents(path)).encode()


def _contents(path: Path) -> Iterator[Path]:
    return (file for file in sorted(path.rglob("*")) if file.is_file() and file != path / SUMS)


def _sum(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _drop(path: Path) -> None:
    """Removes a checkpoint; what is left if that is interrupted does not look like one."""
    if path.exists():
        doomed = path.with_name(f"{PARTIAL}old-{path.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)


def _path(directory: Path, update_index: int) -> Path:
    return directory / FOLDER / f"{update_index:07}"
