"""Files and directories: whole or not at all; and what a result says about where it was made."""

import datetime
import importlib.metadata
import math
import os
import platform
from pathlib import Path
from typing import Any

import jax
import numpy as np

VERSIONED = ("purejaxppo", "jax", "jaxlib", "flax", "optax", "distrax", "gymnax", "numpy")


def machine() -> str:
    """What the numbers were measured on, in words."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        return f"{len(jax.local_devices())} x {device.device_kind}"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores of {models[0] if models else platform.machine()}"


def versions() -> dict[str, str]:
    """Of Python and of the packages that the numbers depend on."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in VERSIONED}


def fresh(name: str) -> Path:
    """The default directory of a run that starts now."""
    return Path("runs") / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"


def claim(out: Path, marker: str = "config.toml") -> None:
    """Makes the directory of a new run; one that has the marker file holds a run.

    Raises:
      ValueError: when it holds a run already, or cannot be made or written to. Nothing is changed then.
    """
    if (out / marker).exists():
        raise ValueError(f"--out {out}: holds a run already; choose another directory")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out}: cannot be made ({error.strerror})") from None
    if not os.access(out, os.W_OK | os.X_OK):
        raise ValueError(f"--out {out}: cannot be written to")


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: lists for arrays, null for NaN and infinities."""
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def replace(path: Path, content: bytes) -> None:
    """Writes a whole file, or leaves the one that was there."""
    with partial(path) as written:
        written.write_bytes(content)


class partial:
    """A name to write under; the file takes its own name once it is complete, or vanishes."""

    def __init__(self, path: Path) -> None:
        self.path, self.partial = path, path.with_name(f".partial-{path.name}")

    def __enter__(self) -> Path:
        return self.partial

    def __exit__(self, error_type: Any, *_: Any) -> None:
        if error_type is None:
            with self.partial.open("rb") as written:
                os.fsync(written.fileno())  # a name must not come before the content when the power fails
            self.partial.replace(self.path)
        else:
            self.partial.unlink(missing_ok=True)
