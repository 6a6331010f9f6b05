"""Finished runs, evaluated: all of them at once, with raw returns and frozen statistics."""

import json
from pathlib import Path
from typing import Any

import numpy as np

import purejaxppo as ppo
from purejaxppo import results, segments
from purejaxppo.config import check_size
from purejaxppo.host import checkpoints, files, training
from purejaxppo.host.policy import find_run


def evaluate(directory: Path, num_episodes: int = 100, seed: int = 0, checkpoint: str = "last") -> dict[str, Any]:
    """Evaluates every run of a run directory, with its most likely actions and with sampled ones; writes
    evaluation.json.

    Args:
      directory: of the run.
      num_episodes: of each run.
      seed: chooses the episodes, none of which a run was trained on.
      checkpoint: "last", "best" by return, or the updates of one that is kept.

    Returns:
      What the file holds.

    Raises:
      ValueError: for a directory without such a checkpoint.
    """
    check_size("num_episodes", num_episodes)
    check_size("seed", seed, lowest=0)
    found = find_run(directory, checkpoint)
    ppo.use_all_cores(at_least=found.shape.num_devices)
    experiment = found.experiment
    chunk = training.chunk_of(training.plan_of(experiment), found)
    state = checkpoints.unflatten(checkpoints.read(found).state, segments.state_shapes(chunk))
    report: dict[str, Any] = {
        "env": experiment.config.env,
        "update_index": found.update_index,
        "num_episodes": num_episodes,
        "seed": seed,
    }
    for name, deterministic in (("deterministic", True), ("sampled", False)):
        episodes = segments.evaluate_all(chunk, state, seed, num_episodes, deterministic)
        returns = np.asarray(episodes.episode_return, np.float64).mean(1)
        low, high = results.interval(returns)
        report[name] = {
            "interquartile_mean": results.interquartile_mean(returns),
            "interval_95": [low, high],
            "per_run": returns,
            "episode_length_per_run": np.asarray(episodes.episode_length, np.float64).mean(1),
        }
    report |= {"machine": files.machine(), "versions": files.versions()}
    report = files.plain(report)
    files.replace(directory / "evaluation.json", json.dumps(report, indent=2).encode())
    return report
