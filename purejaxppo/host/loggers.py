"""Curves for TensorBoard and Weights & Biases: one for each run of the batch, and what the runs say together."""

import importlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from purejaxppo import results
from purejaxppo.host import experiment as experiments
from purejaxppo.host import files
from purejaxppo.host.experiment import Experiment

MODULES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
BY_EPISODE = ("episode_return", "episode_length")  # means over episodes, of which an update may have none

Curves = dict[str, dict[str, float]]  # name of a metric -> name of a curve -> value


def check(names: Sequence[str]) -> None:
    """Raises ValueError unless there are such loggers and they are installed."""
    for name in names:
        if name not in MODULES:
            raise ValueError(f"log = {name!r}: allowed: {', '.join(map(repr, MODULES))}")
        try:
            importlib.import_module(MODULES[name])
        except ImportError:
            raise ValueError(f"log = {name!r}: is not installed; pip install 'purejaxppo[{name}]'") from None


@contextmanager
def opened(
    names: Sequence[str], directory: Path, experiment: Experiment, log_runs: int, done: int = 0
) -> Iterator[Callable[[int, Mapping[str, np.ndarray]], None]]:
    """Yields a function of (updates done at the end of a segment, metrics [n, updates] of it) that writes to all of
    them.

    Args:
      names: of the loggers.
      directory: of the run; TensorBoard's files are in its folder `tensorboard`, those of W&B in `wandb`.
      experiment: its settings.
      log_runs: runs that have curves of their own, the first ones; all of them make up the curves of what they say
        together.
      done: updates before the start; what a killed process logged beyond them is written over.
    """
    batch_size = experiment.config.batch_size
    openers = {"tensorboard": _tensorboard, "wandb": _wandb}
    with ExitStack() as stack:
        writers = [stack.enter_context(openers[name](directory, experiment, done * batch_size)) for name in names]

        def write(update_index: int, metrics: Mapping[str, np.ndarray]) -> None:
            found = curves(metrics, log_runs) if writers else {}
            for writer in writers:
                writer(update_index * batch_size, found)

        yield write


def curves(metrics: Mapping[str, np.ndarray], log_runs: int) -> Curves:
    """A point of every curve: of each metric its mean over the segment, by run and over the runs.

    Args:
      metrics: [n, updates], NaN where there is nothing to tell.
      log_runs: runs that have curves of their own.

    Returns:
      Of each metric `run-0` and so on, and over all runs the interquartile mean and the two quartiles. A run has no
      point where it has no value; the runs together have none as long as one has no value.
    """
    found: Curves = {}
    for name, values in metrics.items():
        weights = metrics["num_episodes"] if name in BY_EPISODE else np.isfinite(values)
        totals = np.where(weights > 0, values * weights, 0.0).sum(1)
        counts = weights.sum(1)
        runs = np.divide(totals, counts, out=np.full(len(values), np.nan), where=counts > 0)
        width = len(str(len(runs) - 1))
        points = {f"run-{index:0{width}}": float(value) for index, value in enumerate(runs[:log_runs])}
        points["interquartile-mean"] = float(results.interquartile_mean(runs))
        points["quartile-25"], points["quartile-75"] = map(float, np.quantile(runs, (0.25, 0.75)))
        found[name] = {curve: value for curve, value in points.items() if np.isfinite(value)}
    return found


@contextmanager
def _tensorboard(directory: Path, experiment: Experiment, steps: int) -> Iterator[Callable[[int, Curves], None]]:
    """A folder for each curve, which TensorBoard then draws in one chart for each metric."""
    module: Any = importlib.import_module("tensorboardX")
    writers: dict[str, Any] = {}

    def write(steps: int, found: Curves) -> None:
        for name, points in found.items():
            for curve, value in points.items():
                if curve not in writers:
                    folder = str(directory / "tensorboard" / curve)
                    writers[curve] = module.SummaryWriter(folder, purge_step=purge, write_to_disk=True)
                writers[curve].add_scalar(name, value, steps)
        for writer in writers.values():
            writer.flush()

    purge = steps + 1 if steps else None
    try:
        yield write
    finally:
        for writer in writers.values():
            writer.close()


@contextmanager
def _wandb(directory: Path, experiment: Experiment, steps: int) -> Iterator[Callable[[int, Curves], None]]:
    """One run of Weights & Biases with a curve `metric/curve` for each curve; WANDB_MODE=offline needs no network."""
    module: Any = importlib.import_module("wandb")
    identity = directory / "wandb-id"
    if not identity.exists():
        files.replace(identity, secrets.token_hex(4).encode())
    try:
        run = module.init(
            project="purejaxppo",
            name=directory.name,
            id=identity.read_text(),
            resume="allow",
            dir=str(directory),
            settings=module.Settings(silent=True),
            config=experiments.to_mapping(experiment),
        )
    except Exception as error:  # of whichever kind: no key, no network
        raise ValueError(f"log = 'wandb': {' '.join(str(error).split())[:300]}; or set WANDB_MODE=offline") from None
    run.define_metric("*", step_metric="steps")

    def write(steps: int, found: Curves) -> None:
        flat = {f"{name}/{curve}": value for name, points in found.items() for curve, value in points.items()}
        run.log(flat | {"steps": steps})

    try:
        yield write
    finally:
        run.finish()
