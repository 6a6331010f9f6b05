"""What the shipped configs learn, over many seeds, against the floor that each should reach; or against a peer.

    python benchmarks/learning.py [cartpole acrobot catch ...] [--num-seeds 16] [--out benchmarks/results/learning.md]
    python benchmarks/learning.py --against rejax [cartpole acrobot breakout-minatar] [--folder DIR] [--quick]

The final return of a run is the mean over the episodes that ended in the last tenth of its updates. Prints the
interquartile mean over the seeds with its 95% bootstrap interval, the worst seed, and whether the floor is reached.

Against a peer both train with the same hyperparameters, on as many steps and seeds, each in a process of its own (see
`side_by_side`); the return of a run is then the mean over 128 episodes of its final policy, of sampled actions.
"""

import argparse
import importlib.metadata
import json
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
from side_by_side import ROOT, TRAINERS, TrainerError, Training, default_folder, install, versions

import purejaxppo as ppo
from purejaxppo import results
from purejaxppo.host import experiment, files
from purejaxppo.types import Metrics

FLOORS = {"cartpole": 490.0, "acrobot": -90.0, "catch": 0.95, "breakout-minatar": 12.0}
PEERS = [name for name, trainer in TRAINERS.items() if name != "ours" and trainer.evaluates]

# Of both sides, besides `side_by_side.WORK`. Nothing here was chosen by what either of them reaches.
COMPARED: dict[str, dict[str, Any]] = {
    "cartpole": {"env": "CartPole-v1", "total_timesteps": 204_800, "learning_rate": 1e-3},
    "acrobot": {
        "env": "Acrobot-v1",
        "total_timesteps": 204_800,
        "num_envs": 16,
        "num_steps": 32,
        "learning_rate": 1e-3,
    },
    "breakout-minatar": {
        "env": "Breakout-MinAtar",
        "total_timesteps": 512_000,
        "num_envs": 64,
        "num_steps": 32,
        "num_minibatches": 8,
        "activation": "relu",
        "learning_rate": 1e-3,
        "ent_coef": 0.01,
    },
}
UNLIKE = (
    "Learning rates are constant and the value loss is clipped, as rejax has them. What stays different: rejax clips "
    "each element of the gradient where we clip its norm, initialises by LeCun's normal where we take orthogonal "
    "matrices, has Adam's epsilon at 1e-8 where ours is 1e-5, and takes a time limit for a terminal state where we "
    "bootstrap. gymnax 0.0.9 and 1.0 have these environments alike."
)


def main() -> None:
    arguments = parse()
    text = compare(arguments) if arguments.against else reach(arguments)
    print("\n" + text)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The arguments; leaves the process with one line if they are wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("configs", nargs="*", metavar="CONFIG", help=f"of {', '.join(FLOORS)}")
    parser.add_argument("--num-seeds", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--against", choices=PEERS, help="a peer to compare with")
    parser.add_argument("--folder", type=Path, default=default_folder(), help="where peers are installed")
    parser.add_argument("--quick", action="store_true", help="tiny work of two seeds, to see that everything runs")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(words)
    allowed: dict[str, Any] = COMPARED if arguments.against else FLOORS
    default = list(COMPARED) if arguments.against else ["cartpole", "acrobot", "catch"]
    arguments.configs = arguments.configs or default
    for name in arguments.configs:
        if name not in allowed:
            parser.error(f"argument CONFIG: there is no {name!r}; allowed: {', '.join(allowed)}")
    if arguments.quick and not arguments.against:
        parser.error("argument --quick: is read only with --against")
    return arguments


def reach(arguments: argparse.Namespace) -> str:
    """What the shipped configs reach."""
    ppo.use_all_cores()

    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "gymnax"))
    lines = [
        f"{arguments.num_seeds} seeds each (seed {arguments.seed}). {packages}, Python {platform.python_version()}, "
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
    return "# Learning\n\n" + "\n".join(lines) + "\n"


def compare(arguments: argparse.Namespace) -> str:
    """What ours and the peer reach on the same budget."""
    try:
        install(arguments.against, arguments.folder)
    except TrainerError as error:
        raise SystemExit(f"learning.py: {arguments.against} is not installed: {error}") from None
    names, lines = ("ours", arguments.against), []
    for config in arguments.configs:
        work = COMPARED[config] | {"num_runs": arguments.num_seeds, "num_episodes": 128}
        if arguments.quick:
            work |= {"total_timesteps": 4096, "num_runs": 2, "num_episodes": 4}
        answers = {}
        for name in names:
            with Training(name, arguments.folder, timeout=3600, **work) as training:
                answers[name] = training.train(arguments.seed)
            print(config, name, json.dumps(answers[name]), file=sys.stderr, flush=True)
        lines += compared(config, work["total_timesteps"], answers)
    return "\n".join(
        [
            f"# Learning, ours and {arguments.against}",
            "",
            f"{work['num_runs']} seeds each (seed {arguments.seed}); a run's return is the mean over "
            f"{work['num_episodes']} episodes of its final policy, of sampled actions. {UNLIKE}",
            "",
            *(f"- {name}: {versions(name, arguments.folder)}" for name in names),
            f"- {files.machine()}",
            "",
            "| environment | steps | trainer | interquartile mean | 95% interval | mean | worst seed | seconds "
            "| intervals overlap |",
            "|---|---|---|---|---|---|---|---|---|",
            *lines,
            "",
        ]
    )


def compared(config: str, steps: int, answers: dict[str, dict[str, Any]]) -> list[str]:
    """A line of the table for each trainer."""
    returns = {name: np.asarray(answer["returns"]) for name, answer in answers.items()}
    intervals = {name: results.interval(values) for name, values in returns.items()}
    together = "yes" if overlap(*intervals.values()) else "NO"
    return [
        f"| {config} | {steps:,} | {name} | {results.interquartile_mean(values):.4g} "
        f"| {intervals[name][0]:.4g} to {intervals[name][1]:.4g} | {np.mean(values):.4g} | {np.min(values):.4g} "
        f"| {answers[name]['seconds']:.0f} | {together} |"
        for name, values in returns.items()
    ]


def overlap(first: tuple[Any, Any], second: tuple[Any, Any]) -> bool:
    """Whether two intervals (low, high) have a point in common."""
    return bool(first[0] <= second[1] and second[0] <= first[1])


if __name__ == "__main__":
    main()
