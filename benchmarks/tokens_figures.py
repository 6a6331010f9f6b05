"""Figures of RLHF on names beyond the frontier: controllers, KL without penalty, and the three algorithms side by side.

    purejaxppo rlhf configs/rlhf-names.toml --out RUN            (and grpo-names, dpo-names for the comparison)
    python benchmarks/tokens_figures.py RUN [--grpo RUN2] [--dpo RUN3] [--out docs]

Writes tokens-controllers.png, tokens-no-penalty.png, tokens-algorithms.png and tokens.json with their numbers. The runs
stand on the reference and the reward models of RUN, those from the number of pairs that `--num-pairs` names.
"""

import argparse
import json
from pathlib import Path

import jax
import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

import purejaxppo as ppo
from purejaxppo.host import files, rlhf_experiment, rlhf_store
from purejaxppo.host.rlhf_plots import COLOURS, STYLE
from purejaxppo.tokens.config import TokenHParams
from purejaxppo.tokens.segments import CAPACITY, Own, Runs

TARGET = 6.0
CONTROLLERS = {
    "fixed at 0.1": {"kl_coef": 0.1},
    "proportional, gain 0.1": {"kl_coef": 0.1, "kl_target": TARGET, "kl_gain": 0.1},
    "doubling": {"kl_coef": 0.1, "kl_target": TARGET, "kl_coef_factor": 2.0},
    "no penalty": {"kl_coef": 0.0},
}


def train(directory: Path, num_pairs: int, num_updates: int) -> dict[str, dict[str, np.ndarray]]:
    """Metrics [seeds, updates] of every controller, on the reward models from `num_pairs` pairs."""
    experiment = rlhf_experiment.read(directory / "config.toml")
    stages = rlhf_store.read_stages(directory, experiment)
    if stages is None:
        raise SystemExit(f"{directory}: holds no stages; run `purejaxppo rlhf` first")
    seeds, number = experiment.num_seeds, experiment.num_pairs.index(num_pairs)
    rows = [experiment.hparams._replace(**changes) for changes in CONTROLLERS.values() for _ in range(seeds)]
    hparams = TokenHParams(*(np.array(column, np.float32) for column in zip(*rows, strict=True)))
    which = np.tile(np.arange(seeds), len(CONTROLLERS))
    scores = jax.tree.map(lambda leaf: leaf[number][which], stages.scores)
    runs = Runs(experiment.config, stages.shared, Own(hparams, score=scores))
    state, parts = runs.start(jax.vmap(jax.random.key)(which)), []
    for done in range(0, num_updates, CAPACITY):
        state, metrics = runs.advance(state, min(CAPACITY, num_updates - done))
        parts.append(metrics._asdict())
    whole = {name: np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}
    pieces = {name: np.split(value, len(CONTROLLERS)) for name, value in whole.items()}
    return {name: {key: value[i] for key, value in pieces.items()} for i, name in enumerate(CONTROLLERS)}


def draw_controllers(path: Path, metrics: dict[str, dict[str, np.ndarray]]) -> None:
    """KL and coefficient over updates, a line a seed."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12, 4.6), dpi=130, layout="constrained")
        panels = figure.subplots(1, 2)
        for name, colour in zip(list(CONTROLLERS)[:3], COLOURS, strict=False):
            for axes, key in zip(panels, ("ref_kl", "kl_coef"), strict=True):
                axes.plot(metrics[name][key].T, color=colour, alpha=0.6, linewidth=1)
            panels[0].plot([], [], color=colour, label=name)
        panels[0].axhline(TARGET, color="k", linestyle=":")
        panels[0].set(title="KL to the reference (target dotted)", xlabel="update", ylabel="nats per response")
        panels[1].set(title="coefficient", xlabel="update", yscale="log")
        panels[0].legend(frameon=False)
        figure.savefig(path)


def draw_no_penalty(path: Path, metrics: dict[str, np.ndarray]) -> float:
    """Square root of the KL over updates without penalty; returns the R^2 of a straight line through the mean."""
    root = np.sqrt(np.maximum(metrics["ref_kl"], 0))
    mean, updates = root.mean(0), np.arange(root.shape[1])
    line = np.polyval(np.polyfit(updates, mean, 1), updates)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.5, 4.6), dpi=130, layout="constrained")
        axes = figure.subplots()
        axes.plot(root.T, color=COLOURS[1], alpha=0.6, linewidth=1)
        axes.plot(updates, line, "k:", label="straight line")
        axes.set(title="without penalty", xlabel="update", ylabel="square root of the KL (nats per response)")
        axes.legend(frameon=False)
        figure.savefig(path)
    return float(1 - ((mean - line) ** 2).sum() / ((mean - mean.mean()) ** 2).sum())


def draw_algorithms(path: Path, summaries: dict[str, dict], num_pairs: int) -> None:
    """Gold reward against KL of each algorithm, a point a coefficient, bars from the lowest to the highest seed."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.5, 4.6), dpi=130, layout="constrained")
        axes = figure.subplots()
        for (name, summary), colour in zip(summaries.items(), COLOURS, strict=False):
            rows = sorted(
                (row for row in summary["settings"] if row["num_pairs"] == num_pairs),
                key=lambda row: np.mean(row["ref_kl"]),
            )
            x = np.sqrt([np.mean(row["ref_kl"]) for row in rows])
            y, low, high = (np.array([pick(row["gold"]) for row in rows]) for pick in (np.mean, np.min, np.max))
            axes.errorbar(x, y, yerr=[y - low, high - y], fmt="o-", color=colour, label=name, capsize=2)
        axes.set(title=f"{num_pairs:,} pairs", xlabel="square root of the KL (nats per response)", ylabel="gold reward")
        axes.legend(frameon=False)
        figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--grpo", type=Path)
    parser.add_argument("--dpo", type=Path)
    parser.add_argument("--num-pairs", type=int, default=1000)
    parser.add_argument("--num-updates", type=int, default=150)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    arguments = parser.parse_args()
    ppo.use_all_cores()
    metrics = train(arguments.run, arguments.num_pairs, arguments.num_updates)
    last = slice(-max(1, arguments.num_updates // 10), None)
    report = {
        "machine": files.machine(),
        "target": TARGET,
        "final_kl": {name: values["ref_kl"][:, last].mean(1) for name, values in metrics.items()},
        "final_kl_coef": {name: values["kl_coef"][:, -1] for name, values in metrics.items()},
        "final_gold": {name: values["gold"][:, last].mean(1) for name, values in metrics.items()},
    }
    draw_controllers(arguments.out / "tokens-controllers.png", metrics)
    report["line_r2"] = draw_no_penalty(arguments.out / "tokens-no-penalty.png", metrics["no penalty"])
    folders = {"PPO": arguments.run, "GRPO": arguments.grpo, "DPO": arguments.dpo}
    summaries = {
        name: json.loads((folder / "summary.json").read_text())
        for name, folder in folders.items()
        if folder is not None
    }
    draw_algorithms(arguments.out / "tokens-algorithms.png", summaries, arguments.num_pairs)
    (arguments.out / "tokens.json").write_text(json.dumps(files.plain(report), indent=1))
    print(json.dumps(files.plain(report), indent=1))


if __name__ == "__main__":
    main()
