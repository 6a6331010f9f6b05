"""What an experiment of `purejaxppo rlhf` says at the end: summary.json, metrics.npz, frontier.png and samples.md."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.table import Table

from purejaxppo.host import files, rlhf_plots
from purejaxppo.host.rlhf_experiment import RlhfExperiment
from purejaxppo.host.rlhf_stages import Stages
from purejaxppo.host.rlhf_store import Checkpoint
from purejaxppo.tokens import names, reward, rlhf, tasks
from purejaxppo.tokens.objectives import best_of_n_kl
from purejaxppo.tokens.types import Quality, Shared, Task

BEST_OF = (1, 2, 4, 8, 16, 32, 64, 128)
REFERENCE_RESPONSES = 2048
NUM_SAMPLES = 12
SAMPLES_KEY = 2**32 - 6


def write(
    out: Path, experiment: RlhfExperiment, stages: Stages, done: Checkpoint, quality: Quality, compile_seconds: float
) -> dict[str, Any]:
    """Writes all of it; returns the summary.

    Args:
      done: all runs after their last update.
      quality: of their policies, NumPy leaves [R, B].
      compile_seconds: of this process.
    """
    task, shared = tasks.resolve(experiment.config, stages.shared)
    key = jax.random.fold_in(jax.random.key(experiment.seed), SAMPLES_KEY)
    reference = _reference(task, shared, key)
    rows = _settings(experiment, quality, done)
    summary = {
        "task": experiment.config.task,
        "algorithm": experiment.config.algorithm,
        "num_seeds": experiment.num_seeds,
        "seed": experiment.seed,
        "settings": rows,
        "reference": {"gold": float(reference.gold.mean()), "length": float(reference.responses.mask.sum(-1).mean())},
        "best_of_n": _best_of_n(experiment, stages, task, reference),
        "stages": stages.report,
        "diverged": _diverged(done.metrics["all_finite"]),
        "updates_per_second": round(len(quality.score) * done.update_index / max(done.run_seconds, 1e-9), 1),
        "tokens_per_second": _tokens_per_second(experiment, done),
        "compile_seconds": round(compile_seconds, 3),
        "run_seconds": round(done.run_seconds, 3),
        "machine": files.machine(),
        "versions": files.versions(),
    }
    summary = files.plain(summary)
    with files.partial(out / "metrics.npz") as path, path.open("wb") as file:
        np.savez_compressed(file, **done.metrics)  # type: ignore[arg-type]
    files.replace(out / "samples.md", samples(experiment, task, rows, reference, quality).encode())
    with files.partial(out / "frontier.png") as path:
        rlhf_plots.frontier(path, summary)
    files.replace(out / "summary.json", json.dumps(summary, indent=1, allow_nan=False).encode())
    return summary


def table(summary: dict[str, Any]) -> Table:
    """The settings, a line each."""
    title = f"{summary['algorithm']} on {summary['task']}, mean of {summary['num_seeds']} seeds"
    rows = Table(
        "pairs", "coefficient", "KL (nats)", "score", "gold", "score - coef * KL", "best possible", title=title
    )
    for row in summary["settings"]:
        cells = (row["kl_coef"], *(_mean(row[name]) for name in ("ref_kl", "score", "gold", "objective")))
        best = "-" if row["optimum"] is None else f"{row['optimum']['objective']:.4g}"
        rows.add_row("-" if row["num_pairs"] is None else f"{row['num_pairs']:,}", *(_shown(c) for c in cells), best)
    return rows


def samples(
    experiment: RlhfExperiment, task: Task, rows: list[dict[str, Any]], reference: Quality, quality: Quality
) -> str:
    """Some responses of the reference and of the first seed's policies, as a table."""
    lines = ["# Samples", "", f"Of seed {experiment.seed}, first run. Each response with its gold reward.", ""]
    lines += ["| policy | coefficient | KL | responses |", "|---|---|---|---|"]
    lines.append(f"| before | | 0 | {_written(experiment, task, reference)} |")
    for index, row in enumerate(rows):
        first = jax.tree.map(lambda leaf, i=index: leaf[i * experiment.num_seeds], quality)
        name = "after" if row["num_pairs"] is None else f"after, {row['num_pairs']:,} pairs"
        kl = float(first.ref_kl.mean())
        lines.append(f"| {name} | {row['kl_coef']:g} | {kl:.2f} | {_written(experiment, task, first)} |")
    return "\n".join(lines) + "\n"


def _written(experiment: RlhfExperiment, task: Task, quality: Quality) -> str:
    """The first responses of a policy."""
    responses, gold = quality.responses, np.asarray(quality.gold)[:NUM_SAMPLES]
    prompt, tokens = (np.asarray(x)[:NUM_SAMPLES] for x in (responses.prompt, responses.tokens))
    if experiment.config.task == "names":
        texts = names.decode(prompt, tokens)
    else:
        ids = (task.model.eos_id, task.model.pad_id)
        texts = ["".join(names.ALPHABET[i] if i not in ids else "" for i in row) or "(empty)" for row in tokens]
    return ", ".join(f"{text} ({value:.1f})" for text, value in zip(texts, gold, strict=True))


def _reference(task: Task, shared: Shared, key: jax.Array) -> Quality:
    """Responses of the reference and their gold reward, NumPy leaves."""
    task, shared = rlhf.with_gold(task, shared)
    draw = jax.jit(lambda key: rlhf.draw(task, shared, shared.reference, REFERENCE_RESPONSES, 1, key)[0])
    return jax.tree.map(np.asarray, draw(key))


def _settings(experiment: RlhfExperiment, quality: Quality, done: Checkpoint) -> list[dict[str, Any]]:
    """Of each setting its numbers, a value a seed."""
    coefs = experiment.settings().kl_coef
    nums = experiment.num_pairs if experiment.config.task == "names" else (None,)
    rows = []
    for index, (num, coef) in enumerate((num, coef) for num in nums for coef in coefs):
        runs = slice(index * experiment.num_seeds, (index + 1) * experiment.num_seeds)
        means = {
            name: np.asarray(getattr(quality, name)[runs], np.float64).mean(1) for name in ("score", "gold", "ref_kl")
        }
        rows.append(
            {
                "num_pairs": num,
                "kl_coef": float(str(coef)),
                **means,
                "objective": means["score"] - coef * means["ref_kl"],
                "length": quality.responses.mask[runs].sum(-1).mean(1),
                "truncated": quality.responses.truncated[runs].mean(1),
                "final_kl_coef": done.metrics["kl_coef"][runs, -1],
                "optimum": _optimum(experiment, float(coef)),
            }
        )
    return rows


def _optimum(experiment: RlhfExperiment, coef: float) -> dict[str, float] | None:
    """What the best policy reaches, where that is known."""
    if experiment.config.task == "names" or coef == 0:
        return None
    sizes = tasks.PARAMS[str(experiment.config.task)] | dict(experiment.config.task_params)
    if experiment.config.task == "token-count":
        best = tasks.token_count_optimum(sizes["vocab_size"], sizes["response_len"], coef)
    else:
        task, shared = tasks.resolve(experiment.config, None)
        log_probs = jax.jit(functools.partial(tasks.enum_log_probs, task))(shared.reference)
        best = tasks.enum_optimum(np.asarray(log_probs), coef)
    return {name: float(value) for name, value in best._asdict().items()}


def _best_of_n(experiment: RlhfExperiment, stages: Stages, task: Task, reference: Quality) -> list[dict[str, Any]]:
    """The best of n responses of the reference by each reward model: KL, score and gold, a value a seed."""
    responses = jax.tree.map(np.asarray, reference.responses)
    if jax.tree.leaves(stages.scores):
        score = jax.jit(jax.vmap(jax.vmap(lambda params: task.score(params, responses))))(stages.scores)
    else:
        score = reference.score[None, None]
    rows = []
    for number, by_seed in enumerate(np.asarray(score)):
        num = experiment.num_pairs[number] if experiment.config.task == "names" else None
        for n in BEST_OF:
            best = [
                [float(reward.best_of_n(values, n, ranked_by)) for values in (ranked_by, reference.gold)]
                for ranked_by in by_seed
            ]
            scores, golds = zip(*best, strict=True)
            rows.append({"num_pairs": num, "n": n, "kl": float(best_of_n_kl(n)), "score": scores, "gold": golds})
    return rows


def _diverged(all_finite: np.ndarray) -> dict[str, int]:
    """The runs that did not stay finite, and the first update in which each did not."""
    broken = ~np.asarray(all_finite)
    return {str(run): int(broken[run].argmax()) for run in np.flatnonzero(broken.any(axis=1))}


def _tokens_per_second(experiment: RlhfExperiment, done: Checkpoint) -> float | None:
    """Tokens that were written, EOS included; None for what writes none."""
    length = done.metrics["length"]
    if np.isnan(length).all():
        return None
    return round(float(length.sum()) * experiment.config.batch_size / max(done.run_seconds, 1e-9))


def _mean(values: Any) -> float:
    return float(np.mean([np.nan if value is None else value for value in values]))


def _shown(value: float) -> str:
    return f"{value:.4g}"
