"""The run directory: one finished experiment, complete enough to repeat it."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from purejaxppo import results
from purejaxppo.host import experiment as experiments
from purejaxppo.host import files, plots
from purejaxppo.host.experiment import Experiment
from purejaxppo.host.sweeps import SweepResult
from purejaxppo.types import Metrics

MATMUL_PRECISION = "jax_default_matmul_precision"


def write(out: Path, experiment: Experiment, result: SweepResult) -> dict[str, Any]:
    """Writes config.toml, metrics.npz, curves.png and summary.json; returns the summary."""
    metrics = Metrics(*(leaf[0] for leaf in result.metrics))
    files.replace(out / "config.toml", experiments.to_toml(experiment).encode())
    with files.partial(out / "metrics.npz") as path:
        np.savez_compressed(path, **metrics._asdict())
    with files.partial(out / "curves.png") as path:
        plots.curves(metrics, experiment.config, path)
    summary = summarize(experiment, result)
    files.replace(out / "summary.json", json.dumps(summary, indent=2).encode())
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
        "machine": files.machine(),
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": min(len(jax.local_devices()), experiment.num_seeds),
            "matmul_precision": str(getattr(jax.config, MATMUL_PRECISION) or "default"),
        },
        "versions": files.versions(),
    }


def _number(value: Any) -> float | None:
    """For JSON, which has no NaN."""
    return float(value) if np.isfinite(value) else None
