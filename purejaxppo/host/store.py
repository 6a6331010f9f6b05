"""The run directory: one finished experiment, complete enough to repeat it."""

import datetime
import importlib.metadata
import json
import math
import os
import platform
from pathlib import Path
from typing import Any

import jax
import numpy as np

from purejaxppo import results
from purejaxppo.host import experiment as experiments
from purejaxppo.host import plots
from purejaxppo.host.experiment import Experiment
from purejaxppo.sweep import SweepResult
from purejaxppo.types import Metrics

MATMUL_PRECISION = "jax_default_matmul_precision"
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


def write(out: Path, experiment: Experiment, result: SweepResult) -> dict[str, Any]:
    """Writes config.toml, metrics.npz, curves.png and summary.json; returns the summary."""
    metrics = Metrics(*(leaf[0] for leaf in result.metrics))
    replace(out / "config.toml", experiments.to_toml(experiment).encode())
    with partial(out / "metrics.npz") as path:
        np.savez_compressed(path, **metrics._asdict())
    with partial(out / "curves.png") as path:
        plots.curves(metrics, experiment.config, path)
    summary = summarize(experiment, result)
    replace(out / "summary.json", json.dumps(summary, indent=2).encode())
    return summary


def read_metrics(path: Path) -> Metrics:
    """The metrics of a run directory's metrics.npz, leaves [num_seeds, num_updates]."""
    with np.load(path) as arrays:
        return Metrics(**arrays)


def summarize(experiment: Experiment, result: SweepResult) -> dict[str, Any]:
    """The numbers to quote: interquartile mean of the final return with its bootstrap interval, speed, versions."""
    metrics = Metrics(*(leaf[0] for leaf in result.metrics))
    returns = results.final_return(metrics)
    low, high = results.interval(returns)
    device = jax.local_devices()[0]
    return {
        "env": experiment.config.env,
        "num_seeds": experiment.num_seeds,
        "seed": experiment.seed,
        "final_return": {
            "interquartile_mean": _number(results.interquartile_mean(returns)),
            "interval_95": [_number(low), _number(high)],
            "per_run": [_number(value) for value in returns],
            "note": "mean over the episodes that ended in the last tenth of the updates; null where none did",
        },
        "diverged": {str(run): update for run, update in results.diverged(metrics).items()},
        "steps_per_second": round(result.steps_per_second),
        "compile_seconds": round(result.compile_seconds, 3),
        "run_seconds": round(result.run_seconds, 3),
        "machine": machine(),
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": min(len(jax.local_devices()), experiment.num_seeds),
            "matmul_precision": str(getattr(jax.config, MATMUL_PRECISION) or "default"),
        },
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in VERSIONED},
    }


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: lists for arrays, null for NaN and infinities."""
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: Any) -> float | None:
    """For JSON, which has no NaN."""
    return float(value) if np.isfinite(value) else None


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
            self.partial.replace(self.path)
        else:
            self.partial.unlink(missing_ok=True)
