"""The run directory: one finished experiment, complete enough to repeat it."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from purejaxppo import results
from purejaxppo.host import experiment as experiments
from purejaxppo.host import files
from purejaxppo.host.experiment import Experiment
from purejaxppo.host.sweeps import SweepResult
from purejaxppo.types import Metrics

MATMUL_PRECISION = "jax_default_matmul_precision"


def write(
    out: Path, experiment: Experiment, result: SweepResult, eval_return: np.ndarray | None = None
) -> dict[str, Any]:
    """Writes config.toml, metrics.npz, curves.png and summary.json; returns the summary.

    Args:
      out: the directory.
      experiment: the settings.
      result: of its runs.
      eval_return: [num_seeds, num_updates] mean return of the evaluations, NaN where none was.
    """
    metrics = Metrics(*(leaf[0] for leaf in result.metrics))
    evaluations = {} if eval_return is None else {"eval_return": eval_return}
    files.replace(out / "config.toml", experiments.to_toml(experiment).encode())
    with files.partial(out / "metrics.npz") as path:
        np.savez_compressed(path, **metrics._asdict(), **evaluations)  # type: ignore[arg-type]
    from purejaxppo.host import plots  # matplotlib, which the start of a training should not wait for

    with files.partial(out / "curves.png") as path:
        plots.curves(metrics, experiment.config, path, eval_return=eval_return)
    summary = summarize(experiment, result)
    if eval_return is not None:
        summary["eval_return"] = _estimate(eval_return[:, -1])
    files.replace(out / "summary.json", json.dumps(summary, indent=2).encode())
    return summary


def read_metrics(path: Path) -> Metrics:
    """The metrics of a run directory's metrics.npz, leaves [num_seeds, num_updates]."""
    with np.load(path) as arrays:
        return Metrics(**{name: arrays[name] for name in Metrics._fields})


def summarize(experiment: Experiment, result: SweepResult) -> dict[str, Any]:
    """The numbers to quote: interquartile mean of the final return with its bootstrap interval, speed, versions."""
    metrics = Metrics(*(leaf[0] for leaf in result.metrics))
    device = jax.local_devices()[0]
    return {
        "env": experiment.config.env,
        "num_seeds": experiment.num_seeds,
        "seed": experiment.seed,
        "final_return": _estimate(results.final_return(metrics))
        | {"note": "mean over the episodes that ended in the last tenth of the updates; null where none did"},
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


def _estimate(values: np.ndarray) -> dict[str, Any]:
    """What runs say together, with the value of each."""
    low, high = results.interval(values)
    return {
        "interquartile_mean": _number(results.interquartile_mean(values)),
        "interval_95": [_number(low), _number(high)],
        "per_run": [_number(value) for value in values],
    }


def _number(value: Any) -> float | None:
    """For JSON, which has no NaN."""
    return float(value) if np.isfinite(value) else None
