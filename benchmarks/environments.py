"""What every shipped configuration learns on its environment, over many seeds, against a floor.

    python benchmarks/environments.py [NAME ...] [--num-seeds 8] [--seed 1] [--out benchmarks/results/environments.md]

A row is written as soon as its runs are done and replaces an older one of that name; the others stay. The final return
of a run is the mean over the episodes that ended in the last tenth of its updates, under the policy that is being
trained. A floor is for the mean over the seeds, or, where a share is given, for at least that share of them.
"""

import argparse
import dataclasses
import importlib.metadata
import platform
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import purejaxppo as ppo
from purejaxppo import results
from purejaxppo.host import experiment, files
from purejaxppo.types import Metrics

ROOT = Path(__file__).parents[1]


class Row(NamedTuple):
    """What to run, and what is expected of it."""

    config: str
    floor: float | None = None  # where none is set, the number is only recorded
    share: float | None = None  # of the seeds that must reach it; None: their mean must
    changes: tuple[tuple[str, Any], ...] = ()  # of the static settings


ROWS = {
    "acrobot": Row("acrobot", -90.0),
    "pendulum": Row("pendulum", -250.0),
    "mountain-car": Row("mountain-car", -130.0, share=0.75),
    "mountain-car-continuous": Row("mountain-car-continuous", 85.0, share=0.5),
    "frozen-lake": Row("frozen-lake", 0.70),
    "four-rooms": Row("four-rooms", 0.95),
    "memory-chain": Row("memory-chain", 0.9),
    "memory-chain, mlp": Row("memory-chain", changes=(("network", "mlp"),)),
    "discounting-chain": Row("discounting-chain", 1.09),
    "deep-sea": Row("deep-sea"),
    "reacher": Row("reacher", 45.0),
    "swimmer": Row("swimmer", 400.0),
    "point-robot": Row("point-robot", 4.0),
    "pong": Row("pong", 900.0),
    "breakout-minatar": Row("breakout-minatar", 12.0),
    "breakout-minatar, cnn": Row("breakout-minatar", changes=(("network", "cnn"), ("total_timesteps", 200_000))),
    "asterix-minatar": Row("asterix-minatar", 1.5),
    "freeway-minatar": Row("freeway-minatar", 26.0),
    "space-invaders-minatar": Row("space-invaders-minatar", 40.0),
    "seaquest-minatar": Row("seaquest-minatar"),
}
HEADER = (
    "| config | seeds | steps | interquartile mean | 95% interval | mean | worst | best | floor | reached "
    "| seconds | steps/s |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(ROWS), metavar="NAME", help=", ".join(ROWS))
    parser.add_argument("--num-seeds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "environments.md")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(ROWS))
    if unknown:
        parser.error(f"there is no row {unknown[0]!r}; allowed: {', '.join(ROWS)}")
    ppo.use_all_cores()
    for name in arguments.names:
        line = measured(name, arguments.num_seeds, arguments.seed)
        print(line, flush=True)
        write(arguments.out, name, line, arguments.seed)


def measured(name: str, num_seeds: int, seed: int) -> str:
    """The table's row of that name."""
    row = ROWS[name]
    settings = experiment.read(ROOT / "configs" / f"{row.config}.toml")
    config = dataclasses.replace(settings.config, **dict(row.changes))
    result = ppo.sweep(config, settings.hparams, num_seeds, seed)
    returns = results.final_return(Metrics(*(leaf[0] for leaf in result.metrics)))
    low, high = results.interval(returns)
    cells = [
        name,
        num_seeds,
        f"{config.total_timesteps:,}",
        f"{results.interquartile_mean(returns):.4g}",
        f"{low:.4g} to {high:.4g}",
        *(f"{statistic(returns):.4g}" for statistic in (np.mean, np.min, np.max)),
        *verdict(row, returns),
        f"{result.compile_seconds + result.run_seconds:.0f}",
        f"{result.steps_per_second:,.0f}",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def verdict(row: Row, returns: np.ndarray) -> tuple[str, str]:
    """The floor, and whether the seeds reach it."""
    if row.floor is None:
        return "-", "-"
    if row.share is None:
        return f"{row.floor:g}", "yes" if np.mean(returns) >= row.floor else "NO"
    reached = np.mean(returns >= row.floor)
    text = f"{'yes' if reached >= row.share else 'NO'} ({reached:.0%} of the seeds)"
    return f"{row.floor:g} in {row.share:.0%}", text


def write(path: Path, name: str, line: str, seed: int) -> None:
    """The table with this row in its place, under what it was measured on."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = {text.split("|")[1].strip(): text for text in lines if text.startswith("| ") and "| config" not in text}
    rows[name] = line
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("jax", "gymnax"))
    heading = (
        f"Seed {seed}, which chose nothing. {versions}, Python {platform.python_version()}, {files.machine()}. Seconds "
        "include compiling; steps/s do not, and are of all runs together."
    )
    table = "\n".join(rows[name] for name in ROWS if name in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    notes = lines[max((i + 1 for i, text in enumerate(lines) if text.startswith("|")), default=len(lines)) :]
    path.write_text("\n".join(["# Environments", "", heading, "", HEADER, table, *notes]).rstrip() + "\n")


if __name__ == "__main__":
    main()
