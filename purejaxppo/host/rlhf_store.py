"""The directory of a run of `purejaxppo rlhf`: what is kept on the way, each file whole or not at all.

config.toml       the settings; the same command goes on from here
stages.npz        reference, reward models, pairs
checkpoint.npz    all runs after some updates, and their metrics so far
metrics.npz       of all runs; summary.json, frontier.png and samples.md at the end
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from purejaxppo.host import files, rlhf_experiment
from purejaxppo.host.rlhf_experiment import RlhfExperiment
from purejaxppo.host.rlhf_stages import Stages
from purejaxppo.tokens import tasks
from purejaxppo.tokens.types import Pairs, Shared, TokenMetrics, TokenState


class Checkpoint(NamedTuple):
    """All runs after some updates."""

    state: TokenState  # NumPy leaves [R, ...]
    metrics: dict[str, np.ndarray]  # [R, updates so far]
    run_seconds: float  # of training so far

    @property
    def update_index(self) -> int:
        """Updates done."""
        return int(self.metrics["score"].shape[1]) if self.metrics else 0


def begin(out: Path, experiment: RlhfExperiment) -> None:
    """Makes the directory of a new experiment, or sees that the one begun there is the same.

    Raises:
      ValueError: for a directory of other settings, or one that cannot be made.
    """
    text = rlhf_experiment.to_toml(experiment)
    config = out / "config.toml"
    if config.exists():
        if config.read_text() != text:
            raise ValueError(f"--out {out}: was begun with other settings; choose another directory")
        return
    files.claim(out)
    files.replace(config, text.encode())


def write_stages(out: Path, stages: Stages) -> None:
    """Keeps what comes before the runs."""
    _save(out / "stages.npz", stages[:3], {"report": np.array(json.dumps(stages.report))})


def read_stages(out: Path, experiment: RlhfExperiment) -> Stages | None:
    """What `write_stages` kept; None if it has not yet come to that."""
    if not (out / "stages.npz").exists():
        return None
    with np.load(out / "stages.npz") as arrays:
        report = json.loads(str(arrays["report"]))
        shared, scores, pairs = _leaves(arrays, _like(experiment))
        return Stages(shared, scores, pairs, report)


def write_checkpoint(out: Path, checkpoint: Checkpoint) -> None:
    """Keeps all runs as they are now, in place of how they were."""
    metrics = {f"metrics/{name}": value for name, value in checkpoint.metrics.items()}
    _save(out / "checkpoint.npz", checkpoint.state, metrics | {"run_seconds": np.array(checkpoint.run_seconds)})


def read_checkpoint(out: Path, like: TokenState) -> Checkpoint | None:
    """What `write_checkpoint` kept last; None if there is none.

    Args:
      like: a state of the same runs.

    Raises:
      ValueError: for a file that is not of such runs.
    """
    if not (out / "checkpoint.npz").exists():
        return None
    with np.load(out / "checkpoint.npz") as arrays:
        state = _leaves(arrays, like)
        if [leaf.shape for leaf in jax.tree.leaves(state)] != [leaf.shape for leaf in jax.tree.leaves(like)]:
            raise ValueError(f"{out}/checkpoint.npz: is not of these runs")
        metrics = {name: arrays[f"metrics/{name}"] for name in TokenMetrics._fields}
        return Checkpoint(state, metrics, float(arrays["run_seconds"]))


def _save(path: Path, tree: Any, more: dict[str, np.ndarray]) -> None:
    leaves = {f"leaf/{index:04}": np.asarray(leaf) for index, leaf in enumerate(jax.tree.leaves(tree))}
    with files.partial(path) as written, written.open("wb") as file:
        np.savez(file, **leaves, **more)  # type: ignore[arg-type]


def _leaves(arrays: Any, like: Any) -> Any:
    """The arrays in the structure of another tree."""
    names = sorted(name for name in arrays if name.startswith("leaf/"))
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in names])


def _like(experiment: RlhfExperiment) -> tuple[Any, Any, Any]:
    """Shared, reward models and pairs of the same structure; their leaves mean nothing."""
    if experiment.config.task != "names":
        return None, (), ()
    model = tasks.make("names", experiment.config.task_params).model
    trunk = jax.eval_shape(model.init, jax.random.key(0))
    shared = Shared(0, 0, trunk, gold={"log_probs": 0, "mean": 0, "std": 0})
    pairs = Pairs(0, 0, 0, 0, 0) if experiment.config.algorithm in ("dpo", "ipo") else ()
    return shared, {"trunk": trunk, "head": 0, "gain": 0, "bias": 0}, pairs
