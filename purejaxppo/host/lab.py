"""`purejaxppo lab`: the text's CartPole lab over many seeds, and how typical its single run was.

One environment, rollouts of 512 steps, minibatches of 64, 40k steps, Adam from 1e-3 to 0, as in the text. The variants
differ in epochs, learning rate, clip and early stop; an adaptive KL penalty and TRPO stand beside them. Seed j draws
the same random numbers in every variant.
"""

import dataclasses
import importlib.metadata
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from purejaxppo import results
from purejaxppo.config import Config, HParams, check_size
from purejaxppo.host import files, lab_plots, progress
from purejaxppo.host.sweeps import sweep
from purejaxppo.types import Metrics

BASE = Config(total_timesteps=40_000, num_envs=1, num_steps=512, num_minibatches=8, num_epochs=10)
RATES = HParams(learning_rate=1e-3)

# Variants of one group share a compiled program: a term that one of them lacks has its neutral number there.
CAREFUL = dataclasses.replace(BASE, kl_penalty=True)
AGGRESSIVE = dataclasses.replace(BASE, num_epochs=40, kl_early_stopping=True)
FAST = RATES._replace(learning_rate=3e-3)

VARIANTS: dict[str, tuple[Config, HParams]] = {
    "PPO": (CAREFUL, RATES),
    "one epoch": (dataclasses.replace(BASE, num_epochs=1), RATES),
    "KL penalty": (CAREFUL, RATES._replace(clip_eps=math.inf, kl_coef=1.0, kl_target=0.01)),
    "TRPO": (dataclasses.replace(BASE, algorithm="trpo"), RATES._replace(max_kl=0.01)),
    "aggressive": (AGGRESSIVE, FAST),
    "aggressive, no clip": (AGGRESSIVE, FAST._replace(clip_eps=math.inf)),
    "aggressive, target KL": (AGGRESSIVE, FAST._replace(target_kl=0.01)),
    "aggressive, no clip, target KL": (AGGRESSIVE, FAST._replace(clip_eps=math.inf, target_kl=0.01)),
}
NEAR_CEILING, STEADY = 475.0, 5


COLUMNS = ("text", "median", "90% of seeds", "bear it out", "the text's run is", "counts")


class Claim(NamedTuple):
    """A sentence of the text as a number of one seed, and the numbers that would bear it out."""

    variant: str
    what: str
    text: str
    low: float
    high: float
    measure: Callable[[dict[str, Metrics]], np.ndarray]  # metrics by variant -> [num_seeds]


def steps_to_ceiling(metrics: Metrics) -> np.ndarray:
    """Environment steps until five updates in a row averaged at least 475, as an eye on the curve would say that it
    has reached the ceiling; inf if none did. [num_seeds]."""
    returns = results.return_curve(metrics, max_points=metrics.episode_return.shape[1])[1]
    averaged = np.lib.stride_tricks.sliding_window_view(returns, STEADY, axis=1).mean(axis=-1)
    reached = averaged >= NEAR_CEILING  # NaN, before the first episode's end, is not
    steps = (reached.argmax(axis=1) + STEADY) * BASE.batch_size
    return np.where(reached.any(axis=1), steps, math.inf)


def largest_fall(metrics: Metrics) -> np.ndarray:
    """The furthest that the return of a later update fell below that of an earlier one. [num_seeds]."""
    returns = results.return_curve(metrics)[1]
    return np.nanmax(np.fmax.accumulate(returns, axis=1) - returns, axis=1)


def late_spread(metrics: Metrics) -> np.ndarray:
    """Standard deviation of the return over the last quarter of training. [num_seeds]."""
    returns = results.return_curve(metrics)[1]
    return np.nanstd(returns[:, -(returns.shape[1] // 4) :], axis=1)


def first_entropy(metrics: Metrics) -> np.ndarray:
    """Entropy after the first update, nats. [num_seeds]."""
    return np.asarray(metrics.entropy)[:, 0]


def lowest_entropy(metrics: Metrics) -> np.ndarray:
    """The lowest entropy of any update, nats. [num_seeds]."""
    return np.asarray(metrics.entropy).min(axis=1)


def _median(variant: str, field: str) -> Callable[[dict[str, Metrics]], np.ndarray]:
    return lambda runs: np.median(getattr(runs[variant], field), axis=1)


def _claims() -> list[Claim]:
    """The claims of the text, by variant. Where it gives one number, 15% either side bear it out."""
    fast, free = "aggressive", "aggressive, no clip"
    stopped, free_stopped = f"{fast}, target KL", f"{free}, target KL"

    def kl_ratio(runs: dict[str, Metrics]) -> np.ndarray:
        return _median(fast, "approx_kl")(runs) / _median("PPO", "approx_kl")(runs)

    return [
        Claim("PPO", "steps to the ceiling", "20-30k", 20e3, 30e3, lambda runs: steps_to_ceiling(runs["PPO"])),
        Claim("PPO", "approx KL, median update", "0.001-0.01", 1e-3, 1e-2, _median("PPO", "approx_kl")),
        Claim("PPO", "clip fraction, median update", "0.05-0.2", 0.05, 0.2, _median("PPO", "clip_fraction")),
        Claim(
            fast,
            "mean return over training, times PPO's",
            "about as fast",
            0.85,
            1.15,
            lambda runs: results.area_under_curve(runs[fast]) / results.area_under_curve(runs["PPO"]),
        ),
        Claim(fast, "clip fraction, median update", "0.1-0.3", 0.1, 0.3, _median(fast, "clip_fraction")),
        Claim(fast, "approx KL, times PPO's", "a few times", 2.0, 10.0, kl_ratio),
        Claim(
            fast,
            "late spread of the return, less PPO's",
            "less steady",
            1.0,
            math.inf,
            lambda runs: late_spread(runs[fast]) - late_spread(runs["PPO"]),
        ),
        Claim(free, "approx KL, median update", "1-10", 1.0, 10.0, _median(free, "approx_kl")),
        Claim(free, "entropy after the first update", "almost 0", 0.0, 0.1, lambda runs: first_entropy(runs[free])),
        Claim(free, "largest fall of the return", "390 to 20", 200.0, 500.0, lambda runs: largest_fall(runs[free])),
        Claim(
            "one epoch",
            "final return",
            "about 300",
            255,
            345,
            lambda runs: results.final_return(runs["one epoch"]),
        ),
        Claim(stopped, "epochs run, median update", "about 12", 10.2, 13.8, _median(stopped, "num_epochs")),
        Claim(free_stopped, "epochs run, median update", "2", 1.7, 2.3, _median(free_stopped, "num_epochs")),
        Claim(
            free_stopped,
            "lowest entropy",
            "above 0.3",
            0.3,
            math.log(2),
            lambda runs: lowest_entropy(runs[free_stopped]),
        ),
        Claim(
            free_stopped,
            "final return",
            "about 400",
            340,
            460,
            lambda runs: results.final_return(runs[free_stopped]),
        ),
    ]


def run_lab(num_seeds: int = 16, seed: int = 0, out: Path | None = None) -> int:
    """Trains every variant with every seed; prints the table and leaves lab.png, lab.json, lab.md and lab.npz.

    Args:
      num_seeds: runs of each variant.
      seed: of all of them; seed j draws the same random numbers in every variant.
      out: directory to write to; by default runs/lab-TIME.

    Returns:
      The exit code: 0, or 1 where a run did not stay finite.

    Raises:
      ValueError: for a number of seeds that is not positive, or a directory that holds a run already.
    """
    check_size("num_seeds", num_seeds)
    out = out or files.fresh("lab")
    files.claim(out, marker="lab.json")
    console = Console()
    runs, seconds = train_variants(num_seeds, seed)
    rows = judge(runs)
    console.print(table(rows, num_seeds))
    with files.partial(out / "lab.npz") as path:
        arrays = {f"{name}/{field}": leaf for name, m in runs.items() for field, leaf in m._asdict().items()}
        np.savez_compressed(path, **arrays)
    with files.partial(out / "lab.png") as path:
        lab_plots.variants(runs, BASE.batch_size, path)
    report = {
        "num_seeds": num_seeds,
        "seed": seed,
        "seconds": round(seconds, 1),
        "versions": {name: importlib.metadata.version(name) for name in files.VERSIONED},
        "machine": files.machine(),
        "claims": rows,
        "final_return": {name: final_row(m) for name, m in runs.items()},
        "diverged": {name: results.diverged(m) for name, m in runs.items() if results.diverged(m)},
    }
    files.replace(out / "lab.md", markdown(report).encode())
    files.replace(out / "lab.json", json.dumps(files.plain(report), indent=1, allow_nan=False).encode())
    console.print(f"{out}/: lab.png, lab.md, lab.json, lab.npz")
    return 1 if report["diverged"] else 0


def train_variants(num_seeds: int, seed: int) -> tuple[dict[str, Metrics], float]:
    """Metrics [num_seeds, num_updates] of every variant, equal configs as one program; and the seconds that took."""
    configs = [config for config, _ in VARIANTS.values()]
    settings = zip(*(hparams for _, hparams in VARIANTS.values()), strict=True)
    hparams = HParams(*(np.array(values, np.float32) for values in settings))
    steps = num_seeds * sum(config.num_updates * config.batch_size for config in configs)
    with progress.bar(Console(stderr=True), configs[0].env, num_seeds * len(configs), steps) as moved:
        result = sweep(configs, hparams, num_seeds, seed, progress=moved)
    runs = {name: Metrics(*(leaf[index] for leaf in result.metrics)) for index, name in enumerate(VARIANTS)}
    return runs, result.compile_seconds + result.run_seconds


def judge(runs: dict[str, Metrics]) -> list[dict[str, Any]]:
    """Each claim beside our median, the middle 90% of the seeds, and how many seeds bear it out."""
    rows = []
    for claim in _claims():
        values = np.asarray(claim.measure(runs), np.float64)
        low, median, high = np.quantile(values, (0.05, 0.5, 0.95), method="inverted_cdf")
        share = np.mean((values >= claim.low) & (values <= claim.high))
        if claim.low <= median <= claim.high:
            verdict = "typical"
        else:
            verdict = "within the spread" if low <= claim.high and claim.low <= high else "not typical"
        rows.append(
            {
                "variant": claim.variant,
                "what": claim.what,
                "text": claim.text,
                "borne_out_by": [claim.low, claim.high],
                "median": median,
                "range_90": [low, high],
                "share_of_seeds": share,
                "verdict": verdict,
            }
        )
    return rows


def final_row(metrics: Metrics) -> dict[str, Any]:
    """Interquartile mean of the final return, and its interval."""
    returns = results.final_return(metrics)
    return {"interquartile_mean": results.interquartile_mean(returns), "interval_95": results.interval(returns)}


def table(rows: list[dict[str, Any]], num_seeds: int) -> Table:
    """The claims for the terminal, by variant."""
    shown = Table(title=f"The CartPole lab: the text's single run and {num_seeds} seeds", box=box.SIMPLE_HEAD)
    shown.add_column("")
    for name in COLUMNS:
        shown.add_column(name, no_wrap=name in ("median", "90% of seeds", "counts"))
    variant = ""
    for row in rows:
        if row["variant"] != variant:
            shown.add_section()
            variant = row["variant"]
            shown.add_row(f"[bold]{variant}[/bold]")
        shown.add_row(*_cells(row)[1:])
    return shown


def markdown(report: dict[str, Any]) -> str:
    """The claims, and the final return of every variant, for a file."""
    versions = ", ".join(f"{name} {report['versions'][name]}" for name in ("jax", "gymnax", "purejaxppo"))
    lines = [
        "# The CartPole lab",
        "",
        f"{report['num_seeds']} seeds of each variant (seed {report['seed']}), {BASE.total_timesteps:,} steps a run, "
        f"in {report['seconds']:.0f} s on {report['machine']}. {versions}.",
        "",
        "Counts: the values of a seed that count as bearing the text out. Where the text gives a range, that; where it "
        "gives one number, 15% either side; where it gives words, our reading of them.",
        "",
        "Typical: the median seed counts. Within the spread: it does not, and some of the middle 90% of the seeds do.",
        "",
        f"| variant | what | {' | '.join(COLUMNS)} |",
        "|---|---" + "|---" * len(COLUMNS) + "|",
        *(f"| {' | '.join(_cells(row))} |" for row in report["claims"]),
        "",
        "| variant | final return, interquartile mean | 95% interval |",
        "|---|---|---|",
    ]
    for name, final in report["final_return"].items():
        low, high = final["interval_95"]
        lines.append(f"| {name} | {final['interquartile_mean']:.4g} | {low:.4g} to {high:.4g} |")
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any]) -> list[str]:
    low, high = map(_short, row["range_90"])
    return [
        row["variant"],
        row["what"],
        row["text"],
        _short(row["median"]),
        f"{low} to {high}",
        f"{row['share_of_seeds']:.0%}",
        row["verdict"],
        " to ".join(map(_bound, row["borne_out_by"])),
    ]


def _bound(value: float) -> str:
    """An end of the range that counts."""
    return "any" if math.isinf(value) else _short(value)


def _short(value: float) -> str:
    """A number in a cell; infinite steps to the ceiling are never."""
    if math.isinf(value):
        return "never"
    return f"{value:.3g}" if abs(value) < 1e3 else f"{value:,.0f}"
