"""What the shipped configs learn, over many seeds, against the floor that each should reach.

    python benchmarks/learning.py [cartpole acrobot catch ...] [--num-seeds 16] [--out benchmarks/results/learning.md]

The final return of a run is the mean over the episodes that ended in the last tenth of its updates. Prints the
interquartile mean over the seeds with its 95% bootstrap interval, the worst seed, and whether the floor is reached.
"""

import argparse
import importlib.metadata
import platform
from pathlib import Path

import numpy as np

import purejaxppo as ppo
from purejaxppo import results
from purejaxppo.host import experiment, files
from purejaxppo.types import Metrics

ROOT = Path(__file__).parents[1]
FLOORS = {"cartpole": 490.0, "acrobot": -90.0, "catch": 0.95, "breakout-minatar": 12.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("configs", nargs="*", default=["cartpole", "acrobot", "catch"], choices=FLOORS)
    parser.add_argument("--num-seeds", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    ppo.use_all_cores()

    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "gymnax"))
    lines = [
        f"{arguments.num_seeds} seeds each (seed {arguments.seed}). {versions}, Python {platform.python_version()}, "
        f"{files.machine()}.",
        "",
        "| config | steps | interquartile mean | 95% interval | mean | worst seed | floor | reached | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in arguments.configs:
        settings = experiment.read(ROOT / "configs" / f"{name}.toml")
        result = ppo.sweep(settings.config, settings.hparams, arguments.num_seeds, arguments.seed)
        returns = results.final_return(Metrics(*(leaf[0] for leaf in result.metrics)))
        middle, (low, high) = results.interquartile_mean(returns), results.interval(returns)
        lines.append(
            f"| {name} | {settings.config.total_timesteps:,} | {middle:.4g} | {low:.4g} to {high:.4g} "
            f"| {np.mean(returns):.4g} | {np.min(returns):.4g} | {FLOORS[name]:g} "
            f"| {'yes' if middle >= FLOORS[name] else 'NO'} | {result.compile_seconds + result.run_seconds:.0f} |"
        )
        print(lines[-1], flush=True)
    print("\n" + "\n".join(lines))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text("# Learning\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
