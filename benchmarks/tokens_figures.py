"""Figures of RLHF on names, and the tables behind them.

    purejaxppo rlhf configs/rlhf-names.toml --out RUN            (and grpo-names, dpo-names for the comparison)
    python benchmarks/tokens_figures.py RUN [--grpo RUN2] [--dpo RUN3] [--docs docs] [--out benchmarks/results]

Trains on the reference and the reward models of RUN: without a penalty for every number of pairs, and with each
controller of the coefficient for one. Writes tokens-overoptimisation.png, tokens-frontier.png, tokens-controllers.png,
tokens-no-penalty.png and tokens-algorithms.png to the docs, and tokens-names.md with the numbers to the results.
"""

import argparse
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

import purejaxppo as ppo
from purejaxppo.host import files, rlhf_experiment, rlhf_store
from purejaxppo.host.rlhf_plots import COLOURS, STYLE
from purejaxppo.tokens import names
from purejaxppo.tokens.config import TokenHParams
from purejaxppo.tokens.segments import Own, Runs

TARGET = 6.0
NO_PENALTY = {"kl_coef": 0.0, "learning_rate": 1e-3, "final_lr_fraction": 1.0}
CONTROLLERS = {
    "fixed at 0.1": {"kl_coef": 0.1},
    "proportional, gain 0.1": {"kl_coef": 0.1, "kl_target": TARGET, "kl_gain": 0.1},
    "doubling": {"kl_coef": 0.1, "kl_target": TARGET, "kl_coef_factor": 2.0},
}
NO_PENALTY_UPDATES, SEGMENT = 150, 10
SAMPLED_AFTER = (0, 10, 20, 40, 80, 150)  # updates without penalty, after which some responses are shown
ROOT_KL = "square root of the KL to the reference (nats per response)"


class Study(NamedTuple):
    """A finished run of `purejaxppo rlhf`."""

    experiment: Any
    stages: Any
    summary: dict[str, Any]


def read(directory: Path) -> Study:
    """What the command left."""
    experiment = rlhf_experiment.read(directory / "config.toml")
    stages = rlhf_store.read_stages(directory, experiment)
    if stages is None:
        raise SystemExit(f"{directory}: holds no stages; run `purejaxppo rlhf` first")
    return Study(experiment, stages, json.loads((directory / "summary.json").read_text()))


def train(
    study: Study, rows: list[tuple[dict[str, float], int]], num_updates: int
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Runs of every row, (changes of the hyperparameters, number of pairs), for every seed.

    Returns:
      Metrics [rows, seeds, updates], and responses of the first run after `SAMPLED_AFTER` updates.
    """
    experiment, seeds = study.experiment, study.experiment.num_seeds
    config = dataclasses.replace(experiment.config, num_updates=num_updates)
    settings = [experiment.hparams._replace(**changes) for changes, _ in rows for _ in range(seeds)]
    hparams = TokenHParams(*(np.array(column, np.float32) for column in zip(*settings, strict=True)))
    number = np.repeat([experiment.num_pairs.index(num) for _, num in rows], seeds)
    seed = np.tile(np.arange(seeds), len(rows))
    scores = jax.tree.map(lambda leaf: leaf[number, seed], study.stages.scores)
    runs = Runs(config, study.stages.shared, Own(hparams, score=scores))
    keys = jax.vmap(jax.random.key)(seed)
    state, parts, samples = runs.start(keys), [], []
    for done in range(0, num_updates, SEGMENT):
        if done in SAMPLED_AFTER:
            samples.append(written(runs, state, keys, done))
        state, metrics = runs.advance(state, min(SEGMENT, num_updates - done))
        parts.append(metrics._asdict())
    samples.append(written(runs, state, keys, num_updates))
    whole = {name: np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}
    return {name: leaf.reshape(len(rows), seeds, -1) for name, leaf in whole.items()}, samples


def written(runs: Runs, state: Any, keys: jax.Array, done: int) -> str:
    """Some responses of the first run, as a row of a table."""
    quality = jax.tree.map(lambda leaf: leaf[0], runs.evaluate(state, keys, 256))
    words = names.decode(quality.responses.prompt, quality.responses.tokens)[:8]
    pairs = ", ".join(f"{word} ({gold:.1f})" for word, gold in zip(words, quality.gold, strict=False))
    means = " | ".join(f"{np.mean(value):.2f}" for value in (quality.ref_kl, quality.score, quality.gold))
    return f"| {done} | {means} | {pairs} |"


def on_grid(metrics: dict[str, np.ndarray], name: str, row: int, grid: np.ndarray) -> np.ndarray:
    """A metric of each seed at given square roots of the KL, [seeds, grid]; NaN where a seed has not been.

    Updates are binned by the largest square root of the KL so far, so that a step back is not a branch of its own.
    """
    roots = np.sqrt(np.maximum(metrics["ref_kl"][row], 0))
    values = metrics[name][row]
    curves = []
    for root, value in zip(roots, values, strict=True):
        order = np.argsort(root)
        curves.append(np.interp(grid, root[order], smooth(value[order]), left=np.nan, right=np.nan))
    return np.array(curves)


def smooth(values: np.ndarray, width: int = 7) -> np.ndarray:
    """A moving mean: an update's 64 responses are few."""
    padded = np.pad(values, width // 2, mode="edge")
    return np.convolve(padded, np.full(width, 1 / width), mode="valid")


def fit_gold(root: np.ndarray, gold: np.ndarray) -> tuple[float, float, float]:
    """(a, b, R^2) of gold = d (a - b log d), d the square root of the KL, by least squares.

    Source: Gao et al. 2022, "Scaling laws for reward model overoptimization", eq. 1 (the form of RL).
    """
    design = np.stack([root, -root * np.log(root)], axis=1)
    (a, b), *_ = np.linalg.lstsq(design, gold, rcond=None)
    residual = gold - design @ (a, b)
    return float(a), float(b), float(1 - residual.var() / gold.var())


def draw_overoptimisation(path: Path, study: Study, metrics: dict[str, np.ndarray]) -> list[str]:
    """Score and gold reward along training without a penalty, a colour a number of pairs; returns the table.

    The mean goes as far as all seeds went, the thin lines as far as each of them did.
    """
    numbers = study.experiment.num_pairs
    lines = [
        "| N | proxy: highest, end | gold of each seed: highest (at this KL) -> end | gold, means | a | b | R^2 |",
        "|---|---|---|---|---|---|---|",
    ]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12, 5), dpi=130, layout="constrained")
        panels = figure.subplots(1, 2, sharex=True)
        for row, (number, colour) in enumerate(zip(numbers, COLOURS, strict=False)):
            furthest = np.sqrt(metrics["ref_kl"][row].max(axis=1))
            grid = np.linspace(0.3, furthest.min(), 80)
            for axes, name in zip(panels, ("score", "gold"), strict=True):
                curves = on_grid(metrics, name, row, grid)
                axes.plot(grid, curves.mean(0), color=colour, label=f"{number:,} pairs", linewidth=2)
                axes.fill_between(grid, curves.min(0), curves.max(0), color=colour, alpha=0.15, linewidth=0)
                beyond = np.linspace(0.3, furthest.max(), 160)
                axes.plot(beyond, on_grid(metrics, name, row, beyond).T, color=colour, alpha=0.5, linewidth=0.7)
            a, b, r2 = fit_gold(grid, curves.mean(0))
            panels[1].plot(grid, grid * (a - b * np.log(grid)), ":", color=colour)
            lines.append(f"| {number:,} | {_humps(metrics, row)} | {a:.2f} | {b:.2f} | {r2:.2f} |")
        for axes, title in zip(panels, ("what is optimised (score)", "what is wanted (gold)"), strict=True):
            axes.set(title=title, xlabel=ROOT_KL, ylabel=title.split("(")[1][:-1])
        panels[0].legend(frameon=False)
        seeds = study.experiment.num_seeds
        figure.suptitle(f"PPO without a penalty: mean, range and lines of {seeds} seeds; dotted: d (a - b log d)")
        figure.savefig(path)
    return lines


def _humps(metrics: dict[str, np.ndarray], row: int) -> str:
    """How high score and gold came along training, and where they ended, as cells of a table."""
    score, gold = (np.array([smooth(values) for values in metrics[name][row]]) for name in ("score", "gold"))
    kl, best = np.array([smooth(values) for values in metrics["ref_kl"][row]]), gold.argmax(axis=1)
    tops = [
        f"{curve[top]:.2f} ({far[top]:.1f}) -> {curve[-1]:.2f}" for curve, far, top in zip(gold, kl, best, strict=True)
    ]
    means = f"{gold.max(axis=1).mean():.2f}, {gold[:, -1].mean():.2f}"
    return f"{score.max(axis=1).mean():.2f}, {score[:, -1].mean():.2f} | {'; '.join(tops)} | {means}"


def draw_controllers(path: Path, metrics: dict[str, np.ndarray]) -> list[str]:
    """KL and coefficient over updates, a line a seed; returns the table."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12, 4.6), dpi=130, layout="constrained")
        panels = figure.subplots(1, 2)
        for row, (name, colour) in enumerate(zip(CONTROLLERS, COLOURS, strict=False)):
            for axes, key in zip(panels, ("ref_kl", "kl_coef"), strict=True):
                axes.plot(metrics[key][row].T, color=colour, alpha=0.6, linewidth=1)
            panels[0].plot([], [], color=colour, label=name)
        panels[0].axhline(TARGET, color="k", linestyle=":")
        panels[0].set(title="KL to the reference (target dotted)", xlabel="update", ylabel="nats per response")
        panels[1].set(title="coefficient", xlabel="update", yscale="log")
        panels[0].legend(frameon=False)
        figure.savefig(path)
    lines = [
        "| controller | KL, mean of the last tenth, a seed each | coefficient at the end | gold |",
        "|---|---|---|---|",
    ]
    last = slice(-max(1, metrics["ref_kl"].shape[-1] // 10), None)
    for row, name in enumerate(CONTROLLERS):
        kl, gold = (metrics[key][row][:, last].mean(1) for key in ("ref_kl", "gold"))
        cells = (", ".join(f"{value:.2f}" for value in values) for values in (kl, metrics["kl_coef"][row][:, -1], gold))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def draw_no_penalty(path: Path, study: Study, metrics: dict[str, np.ndarray]) -> list[str]:
    """Square root of the KL over updates without a penalty; returns the R^2 of a line through the rise of each."""
    lines = [
        "| N | R^2 of a straight line, up to two thirds of the last value | updates until then |",
        "|---|---|---|",
    ]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.5, 4.6), dpi=130, layout="constrained")
        axes = figure.subplots()
        for row, (number, colour) in enumerate(zip(study.experiment.num_pairs, COLOURS, strict=False)):
            root = np.sqrt(np.maximum(metrics["ref_kl"][row], 0))
            axes.plot(root.T, color=colour, alpha=0.35, linewidth=0.8)
            mean = root.mean(0)
            axes.plot(mean, color=colour, label=f"{number:,} pairs")
            rise = int(np.argmax(mean > mean[-10:].mean() * 2 / 3))
            updates = np.arange(rise)
            residual = mean[:rise] - np.polyval(np.polyfit(updates, mean[:rise], 1), updates)
            lines.append(f"| {number:,} | {1 - residual.var() / mean[:rise].var():.3f} | {rise} |")
        axes.set(title="PPO without a penalty", xlabel="update", ylabel="square root of the KL (nats per response)")
        axes.legend(frameon=False)
        figure.savefig(path)
    return lines


def draw_algorithms(path: Path, studies: dict[str, Study], num_pairs: int) -> list[str]:
    """Gold reward against KL of each algorithm, a point a coefficient, bars over the seeds; returns the table."""
    lines = ["| algorithm | coefficient | KL | gold, mean (lowest to highest seed) |", "|---|---|---|---|"]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.5, 4.6), dpi=130, layout="constrained")
        axes = figure.subplots()
        for (name, study), colour in zip(studies.items(), COLOURS, strict=False):
            rows = [row for row in study.summary["settings"] if row["num_pairs"] == num_pairs]
            rows.sort(key=lambda row: np.mean(row["ref_kl"]))
            x = np.array([np.mean(row["ref_kl"]) for row in rows])
            y, low, high = (np.array([pick(row["gold"]) for row in rows]) for pick in (np.mean, np.min, np.max))
            axes.errorbar(np.sqrt(x), y, yerr=[y - low, high - y], fmt="o-", color=colour, label=name, capsize=2)
            lines += [
                f"| {name} | {row['kl_coef']:g} | {kl:.2f} | {mean:.2f} ({least:.2f} to {most:.2f}) |"
                for row, kl, mean, least, most in zip(rows, x, y, low, high, strict=True)
            ]
        axes.set(title=f"{num_pairs:,} pairs", xlabel=ROOT_KL, ylabel="gold reward")
        axes.legend(frameon=False)
        figure.savefig(path)
    return lines


def compare_frontiers(study: Study, metrics: dict[str, np.ndarray]) -> list[str]:
    """Gold of the runs with a penalty less that of the run without one of the same seed, where it had the same KL."""
    lines = ["| N | coefficient | gold with a penalty - gold without, at equal KL: a seed each |", "|---|---|---|"]
    for row, number in enumerate(study.experiment.num_pairs):
        for setting in (each for each in study.summary["settings"] if each["num_pairs"] == number):
            root = np.sqrt(setting["ref_kl"])
            without = [on_grid(metrics, "gold", row, np.array([each]))[i, 0] for i, each in enumerate(root)]
            gains = np.array(setting["gold"]) - without
            lines.append(
                f"| {number:,} | {setting['kl_coef']:g} | " + ", ".join(f"{gain:+.2f}" for gain in gains) + " |"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--grpo", type=Path)
    parser.add_argument("--dpo", type=Path)
    parser.add_argument("--num-pairs", type=int, default=1000, help="of the controllers and of the three algorithms")
    parser.add_argument("--num-updates", type=int, default=300, help="of the controllers")
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    ppo.use_all_cores()
    study, docs = read(arguments.run), arguments.docs
    others = {"GRPO": arguments.grpo, "DPO": arguments.dpo}
    studies = {"PPO": study} | {name: read(folder) for name, folder in others.items() if folder is not None}
    free, samples = train(study, [(NO_PENALTY, num) for num in study.experiment.num_pairs], NO_PENALTY_UPDATES)
    held, _ = train(study, [(each, arguments.num_pairs) for each in CONTROLLERS.values()], arguments.num_updates)
    shutil.copyfile(arguments.run / "frontier.png", docs / "tokens-frontier.png")
    sections = {
        "Over-optimisation, along training without a penalty": draw_overoptimisation(
            docs / "tokens-overoptimisation.png", study, free
        ),
        "Does a penalty move the frontier?": compare_frontiers(study, free),
        f"Controllers of the coefficient, target {TARGET:g} nats": draw_controllers(
            docs / "tokens-controllers.png", held
        ),
        "The square root of the KL without a penalty": draw_no_penalty(docs / "tokens-no-penalty.png", study, free),
        "Three algorithms": draw_algorithms(docs / "tokens-algorithms.png", studies, arguments.num_pairs),
        f"Responses along training without a penalty, {study.experiment.num_pairs[0]:,} pairs, one seed": [
            "| updates | KL | score | gold | responses (gold) |",
            "|---|---|---|---|---|",
            *samples,
        ],
    }
    text = [
        "# RLHF on names",
        "",
        f"{files.machine()}, jax {jax.__version__}, {study.experiment.num_seeds} seeds.",
        f"Stages: {json.dumps(study.stages.report)}",
    ]
    for title, lines in sections.items():
        text += ["", f"## {title}", "", *lines]
    (arguments.out / "tokens-names.md").write_text("\n".join(text) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()
