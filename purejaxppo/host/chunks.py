"""The directory of a sweep: what it is of, and each finished chunk in a file of its own.

`plan.toml` says which runs the sweep is of and how they are cut into chunks; `chunks/NNNNN.npz` holds the metrics of
one chunk. A file has its own name only once it is complete, so a directory can be left at any moment and gone on with.
"""

import dataclasses
import fcntl
import io
import tomllib
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tomli_w

from purejaxppo import kinds
from purejaxppo.host import files
from purejaxppo.plan import Group, Plan, Shape

if TYPE_CHECKING:
    from purejaxppo.kinds import AnyConfig, AnyMetrics

PLAN = "plan.toml"


class Store:
    """The directory of one sweep, held by this process alone until it is closed."""

    def __init__(self, directory: Path, plan: Plan) -> None:
        """Makes the directory of a plan, or goes on with it; see `adopt` for what a directory may hold."""
        self.directory, self.plan, text = directory, plan, to_toml(plan)
        try:
            (directory / "chunks").mkdir(parents=True, exist_ok=True)
            self._lock = (directory / ".lock").open("w")
        except OSError as error:
            raise ValueError(f"{directory}: cannot be written to ({error.strerror})") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{directory}: another process is working on this sweep") from None
        for left in directory.glob("**/.partial-*"):
            left.unlink()
        if not (directory / PLAN).exists():
            files.replace(directory / PLAN, text.encode())

    def close(self) -> None:
        """Lets others work on the directory."""
        self._lock.close()

    def read(self, index: int) -> Any:
        """The metrics of a finished chunk, leaves [n, num_updates]; None for one that is missing or damaged."""
        return read(self.directory, self.plan, index)

    def write(self, index: int, metrics: "AnyMetrics") -> None:
        """Keeps a finished chunk."""
        content = io.BytesIO()
        np.savez(content, **metrics._asdict())
        files.replace(_path(self.directory, index), content.getvalue())


def read(directory: Path, plan: Plan, index: int) -> Any:
    """As `Store.read`, of a directory that somebody else may be writing to."""
    path = _path(directory, index)
    group, runs = plan.places[index]
    try:
        with np.load(path) as arrays:  # checks the sum of each array
            metrics = kinds.of(plan.hparams).metrics(**arrays)
        if {leaf.shape for leaf in metrics} != {(len(runs), group.config.num_updates)}:
            raise ValueError("arrays of another shape")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile) as error:
        warnings.warn(f"{path}: damaged ({error}); this chunk counts as not run", stacklevel=2)
        return None
    return metrics


def find(directory: Path) -> Plan | None:
    """The plan of the sweep in a directory, None if it holds none.

    Raises:
      ValueError: when its plan cannot be read.
    """
    path = directory / PLAN
    try:
        content = tomllib.loads(path.read_text())
        return _from_toml(content)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as the plan of a sweep ({error})") from None


def adopt(directory: Path, plan: Plan, chunk_size: int | None) -> Plan | None:
    """The plan in a directory if it is of the same runs, with its own chunks; None if there is none.

    Raises:
      ValueError: when the directory holds another sweep, or another `chunk_size` was asked for than it has.
    """
    found = find(directory)
    if found is None:
        return None
    if kinds.of(found.hparams) is not kinds.of(plan.hparams):
        raise ValueError(f"{directory}: holds another sweep, of runs on {kinds.of(found.hparams).name}")
    different = [name for name in ("num_seeds", "seed") if getattr(found, name) != getattr(plan, name)]
    if len(found.configs) != len(plan.configs):
        different.append("the number of settings")
    else:
        fields = [field.name for field in dataclasses.fields(plan.configs[0])]
        pairs = list(zip(found.configs, plan.configs, strict=True))
        different += [
            f"config.{name}" for name in fields if any(getattr(a, name) != getattr(b, name) for a, b in pairs)
        ]
        leaves = zip(plan.hparams._fields, found.hparams, plan.hparams, strict=True)
        different += [f"hparams.{name}" for name, a, b in leaves if not np.array_equal(a, b)]
    if different:
        raise ValueError(f"{directory}: holds another sweep, which differs in {', '.join(different)}")
    sizes = sorted({group.chunk_size for group in found.groups})
    if chunk_size is not None and sizes != sorted({group.chunk_size for group in plan.groups}):
        have = ", ".join(map(str, sizes))
        raise ValueError(f"chunk_size = {chunk_size}: {directory} was begun with chunks of {have} runs")
    begun = tomllib.loads((directory / PLAN).read_text())["versions"]
    newer = [f"{name} {begun.get(name)} -> {now}" for name, now in files.versions().items() if begun.get(name) != now]
    if newer:
        text = f"{directory}: was begun with other versions, last bits may differ: {', '.join(newer)}"
        warnings.warn(text, stacklevel=2)
    return found


def num_devices(plan: Plan) -> int:
    """Devices that the plan's chunks lie on."""
    return max(group.shape.num_devices for group in plan.groups)


def to_toml(plan: Plan) -> str:
    """All of a plan, and with which versions it was begun."""
    unique = list(dict.fromkeys(plan.configs))
    hparams = {name: leaf.tolist() for name, leaf in plan.hparams._asdict().items()}
    content = {
        "kind": kinds.of(plan.hparams).name,
        "num_seeds": plan.num_seeds,
        "seed": plan.seed,
        "config_of_setting": [unique.index(config) for config in plan.configs],
        "hparams": {name: values if len(set(values)) > 1 else values[0] for name, values in hparams.items()},
        "config": [_to_mapping(config) for config in unique],
        "chunks": [group.shape._asdict() | {"chunk_size": group.chunk_size} for group in plan.groups],
        "versions": files.versions(),
    }
    return tomli_w.dumps(content)


def _from_toml(content: dict[str, Any]) -> Plan:
    kind = kinds.named(content.get("kind", kinds.ENVIRONMENTS.name))
    unique = [kind.from_mapping(config) for config in content["config"]]
    of_setting = content["config_of_setting"]
    size = len(of_setting)
    values = {name: np.broadcast_to(np.float32(value), size) for name, value in content["hparams"].items()}
    hparams = kind.hparams(**values)
    groups = []
    for index, (config, chunk) in enumerate(zip(unique, content["chunks"], strict=True)):
        members = tuple(i for i, which in enumerate(of_setting) if which == index)
        chunk_size = chunk.pop("chunk_size")
        groups.append(Group(config, members, Shape(**chunk), chunk_size))
    configs = tuple(unique[i] for i in of_setting)
    return Plan(configs, hparams, content["num_seeds"], content["seed"], tuple(groups))


def _to_mapping(config: "AnyConfig") -> dict[str, Any]:
    """A config as TOML has it."""
    if not isinstance(getattr(config, "task", ""), str):
        raise ValueError("config.task: is a Task of one's own, which a directory cannot name: sweep without one")
    content = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    pairs = "env_params" if "env_params" in content else "task_params"
    return content | {pairs: dict(content[pairs])}


def _path(directory: Path, index: int) -> Path:
    return directory / "chunks" / f"{index:05}.npz"
