"""Going on with runs that were begun before: whose directory it is, from where, and with which settings."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from purejaxppo.host import checkpoints, files
from purejaxppo.host import experiment as experiments
from purejaxppo.host.checkpoints import Found
from purejaxppo.host.experiment import Experiment


def begun(directory: Path) -> Experiment:
    """The settings that the run in a directory was begun with.

    Raises:
      ValueError: for a directory that holds no training run.
    """
    if (directory / "plan.toml").exists():
        raise ValueError(f"{directory}: holds a sweep; the command that began it goes on with it")
    if not (directory / "config.toml").exists():
        there = "there is no such directory" if not directory.is_dir() else "holds no training run (no config.toml)"
        raise ValueError(f"{directory}: {there}")
    return experiments.read(directory / "config.toml")


def prepare(directory: Path, experiment: Experiment) -> tuple[Found | None, list[str]]:
    """Where the training in a directory is to go on.

    Args:
      directory: of a run.
      experiment: what is to be trained.

    Returns:
      The newest intact checkpoint, None if the run is to begin again; and notes for the person.

    Raises:
      ValueError: when the settings are not those that the run was begun with.
    """
    found, notes = checkpoints.find(directory)
    begun = experiments.read(directory / "config.toml") if found is None else found.experiment
    check_same(directory, begun, experiment)
    if found is None:
        return None, [*notes, "there is no checkpoint to go on from: the runs start again from their beginning"]
    now, then = files.versions(), found.about["versions"]
    changed = [f"{name} {then.get(name)} -> {now[name]}" for name in now if then.get(name) != now[name]]
    if changed:
        notes.append(f"other versions than before ({', '.join(changed)}): the last bits of the numbers may differ")
    if begun.config.total_timesteps != experiment.config.total_timesteps:
        notes.append(_extension(begun, experiment, found.update_index))
    return found, notes


def check_same(directory: Path, begun: Experiment, wanted: Experiment) -> None:
    """Raises ValueError unless the runs were begun with these settings, or a smaller `total_timesteps`."""
    different = experiments.differences(begun, wanted)
    if "config.total_timesteps" in different and wanted.config.total_timesteps > begun.config.total_timesteps:
        different.remove("config.total_timesteps")
    if different:
        raise ValueError(
            f"{directory}: was begun with other settings: {', '.join(different)}; "
            "only a larger config.total_timesteps can be gone on with"
        )


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """The directory, for this process alone.

    Raises:
      ValueError: when another process trains in it, or it cannot be written to.
    """
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ValueError(f"{directory}: cannot be written to")
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise ValueError(f"{directory}: another process is training in it") from None
    try:
        yield
    finally:
        os.close(handle)


def _extension(begun: Experiment, wanted: Experiment, done: int) -> str:
    """What going on to a larger total means for the learning rate."""
    old, new = begun.config, wanted.config
    start, fraction = wanted.hparams.learning_rate, wanted.hparams.final_lr_fraction
    before, after = (start * (1 - (1 - fraction) * done / config.num_updates) for config in (old, new))
    return (
        f"extended from {old.total_timesteps:,} to {new.total_timesteps:,} steps per run: the learning rate now falls "
        f"towards its end at the new total, and goes on from {after:.3g} where it had come to {before:.3g}"
    )
