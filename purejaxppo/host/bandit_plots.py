"""Pictures of the bandit: the two learners, the clip, and the map of settings."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import scipy.stats
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from purejaxppo import ops
from purejaxppo.host import plots
from purejaxppo.host.bandit_facts import CLIP, NO_CLIP, Summary

LEARNERS = ((NO_CLIP, "no clip", "#D55E00"), (CLIP, "clip 0.2", "#0072B2"))
STYLE: Any = {"font.size": 11, "axes.titlesize": 12, "axes.spines.top": False, "axes.spines.right": False}


def save_learners(path: Path, demo: Summary) -> None:
    """Four panels: reward, KL inside one batch, final policies, wrong-arm share.

    Args:
      path: PNG to write.
      demo: leaves [settings, seeds, ...], with and without the clip.
    """
    seeds = demo.wrong.shape[1]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(13, 10), dpi=130, layout="constrained")
        figure.suptitle(f"One noisy batch, 40 ascent steps: {seeds} runs of each learner, same random numbers", size=15)
        grid = figure.add_gridspec(2, 2, hspace=0.08, wspace=0.06)
        _plot_reward(figure.add_subplot(grid[0, 0]), demo.expected_reward)
        _plot_step_kl(figure.add_subplot(grid[0, 1]), demo.first_kl)
        _plot_simplices(figure.add_subplot(grid[1, 0]), demo.policy[:, :, -1])
        _plot_wrong(figure.add_subplot(grid[1, 1]), demo.wrong)
        figure.savefig(path)


def save_clip(path: Path, clip_eps: float = 0.2) -> None:
    """The PPO-clip objective of one sample against its ratio, for a good and a bad action."""
    ratio = np.linspace(0.0, 2.0, 2001, dtype=np.float32)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12, 5.4), dpi=130, layout="constrained")
        figure.suptitle(f"What one sample pays for: PPO-clip with eps = {clip_eps:g}", size=15)
        panels = figure.subplots(1, 2)
        for axes, advantage in zip(panels, (1.0, -1.0), strict=True):
            _plot_clip(axes, ratio, advantage, clip_eps)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(path)


def save_map(path: Path, cells: dict[str, np.ndarray], axes: dict[str, tuple[float, ...]], seeds: int) -> None:
    """Heat maps over clip_eps and num_pulls, one column a num_epochs.

    Args:
      path: PNG to write.
      cells: "wrong_arm" and "expected_reward", [num_epochs, num_pulls, clip_eps].
      axes: values of those three.
      seeds: runs behind each cell.
    """
    rows = (("wrong_arm", "on a wrong arm (%)", "viridis_r", 100), ("expected_reward", "expected reward", "viridis", 1))
    columns = axes["num_epochs"]
    with mpl.rc_context({**STYLE, "axes.spines.left": False, "axes.spines.bottom": False}):
        figure = Figure(figsize=(3.1 * len(columns) + 1.5, 8), dpi=130, layout="constrained")
        figure.suptitle(
            f"After 10 iterations of K ascent steps each; {seeds} runs a cell, 95% intervals under 2 points wide",
            size=15,
        )
        panels = figure.subplots(2, len(columns), sharex=True, sharey=True)
        for line, (name, label, colors, scale) in zip(panels, rows, strict=True):
            values = scale * cells[name]
            for panel, epochs, value in zip(line, columns, values, strict=True):
                texts = np.strings.mod("%.0f" if scale > 1 else "%.2f", value)
                image = plots.cells(panel, value, (values.min(), values.max()), colors, texts)
                panel.set_xticks(range(len(axes["clip_eps"])), [_number(x) for x in axes["clip_eps"]])
                panel.set_yticks(range(len(axes["num_pulls"])), [_number(x) for x in axes["num_pulls"]])
                panel.set_title(f"K = {epochs:g}" if name == "wrong_arm" else "")
            figure.colorbar(image, ax=line.tolist(), label=label, pad=0.01)
            line[0].set_ylabel("pulls a batch, N")
        for panel in panels[-1]:
            panel.set_xlabel("clip range eps")
        figure.savefig(path)


def wilson(successes: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """95% Wilson interval of each share successes / number."""
    intervals = [scipy.stats.binomtest(int(count), number).proportion_ci(method="wilson") for count in successes.flat]
    low, high = np.array([(interval.low, interval.high) for interval in intervals]).T
    return low.reshape(successes.shape), high.reshape(successes.shape)


def normal(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """95% normal interval of the mean over axis 0."""
    center = values.mean(axis=0, dtype=np.float64)
    half = scipy.stats.norm.ppf(0.975) * values.std(axis=0, dtype=np.float64) / np.sqrt(len(values))
    return center - half, center + half


def _plot_reward(axes: Axes, reward: np.ndarray) -> None:
    for index, name, color in LEARNERS:
        steps = np.arange(reward.shape[-1])
        axes.fill_between(steps, *np.quantile(reward[index], [0.25, 0.75], axis=0), color=color, alpha=0.12, lw=0)
        axes.fill_between(steps, *normal(reward[index]), color=color, alpha=0.4, lw=0)
        axes.plot(steps, reward[index].mean(axis=0), color=color, label=name, lw=2)
    for mean, arm in ((1.0, "arm A"), (0.6, "arm B")):
        axes.axhline(mean, color="0.5", lw=0.8, ls=":")
        axes.text(steps[-1], mean + 0.008, arm, color="0.4", ha="right")
    axes.set(xlabel="iteration", ylabel="expected reward", xlim=(0, steps[-1]), xticks=steps[::5])
    axes.set_title("Expected reward: mean and its 95% interval (dark), middle half of the runs (light)", size=11)
    axes.legend(loc="lower right", frameon=False)


def _plot_step_kl(axes: Axes, kl: np.ndarray) -> None:
    steps = np.arange(1, kl.shape[-1] + 1)
    for index, name, color in LEARNERS:
        low, middle, high = np.quantile(kl[index], [0.1, 0.5, 0.9], axis=0)
        axes.fill_between(steps, low, high, color=color, alpha=0.2, lw=0)
        axes.plot(steps, middle, color=color, label=name, lw=2)
    axes.set(xlabel="ascent step on the first batch", ylabel="KL(old || new), nats", yscale="log")
    axes.set(xlim=(1, steps[-1]), ylim=(1e-3, None))
    axes.set_title("KL inside one batch: median, and 10% to 90% of the runs", size=11)
    axes.legend(loc="lower right", frameon=False)


def _plot_simplices(axes: Axes, policy: np.ndarray) -> None:
    generator = np.random.default_rng(0)
    for offset, (index, name, color) in zip((0.0, 1.45), LEARNERS, strict=True):
        corners = np.array([[0.5, np.sqrt(0.75)], [0.0, 0.0], [1.0, 0.0]]) + np.array([offset, 0.0])
        axes.fill(*corners.T, facecolor="0.97", edgecolor="0.5", lw=1)
        jitter = generator.normal(scale=0.012, size=(policy.shape[1], 2))
        x, y = (policy[index] @ corners + jitter)[:2000].T
        axes.scatter(x, y, s=16, color=color, alpha=0.35, lw=0)
        shares = np.bincount(policy[index].argmax(axis=-1), minlength=3) / policy.shape[1]
        for arm, (x, y), share in zip("ABC", corners, shares, strict=True):
            place = {"y": y + 0.06, "va": "bottom"} if y > 0 else {"y": y - 0.06, "va": "top"}
            axes.text(x, s=f"{arm}: {share:.1%}", ha="center", **place)
        axes.text(offset + 0.5, -0.2, name, color=color, ha="center", va="top", weight="bold")
    axes.set(aspect="equal", xlim=(-0.15, 2.6), ylim=(-0.3, 1.0))
    axes.set_axis_off()
    axes.set_title("Final policies, a dot a run; at the corners, the share of runs that prefer the arm", size=11)


def _plot_wrong(axes: Axes, wrong: np.ndarray) -> None:
    steps = np.arange(wrong.shape[-1])
    for index, name, color in LEARNERS:
        counts = wrong[index].sum(axis=0)
        low, high = wilson(counts, wrong.shape[1])
        axes.fill_between(steps[1:], 100 * low[1:], 100 * high[1:], color=color, alpha=0.25, lw=0)
        axes.plot(steps[1:], 100 * counts[1:] / wrong.shape[1], color=color, label=name, lw=2)
    axes.axhline(100 / 3, color="0.5", lw=0.8, ls=":")
    axes.annotate("a third", (steps[-1], 100 / 3), (4, 0), textcoords="offset points", color="0.4", va="center")
    axes.set(xlabel="iteration", ylabel="runs (%)", xlim=(1, steps[-1]), ylim=(0, None), xticks=[1, *steps[5::5]])
    axes.set_title("Runs whose most likely arm is wrong, and the 95% interval of the share", size=11)
    axes.legend(loc="center right", frameon=False)


def _plot_clip(axes: Axes, ratio: np.ndarray, advantage: float, clip_eps: float) -> None:
    def objective(log_ratio: jax.Array) -> jax.Array:
        return ops.clipped_surrogate(log_ratio, jnp.full_like(log_ratio, advantage), clip_eps)

    log_ratio = jnp.log(ratio)
    slope = np.asarray(jax.vmap(jax.grad(objective))(log_ratio[1:]))
    flat = ratio[1:][slope == 0]
    axes.axvspan(flat.min(), flat.max(), color="0.9", lw=0)
    middle = float(flat.min() + flat.max()) / 2
    axes.text(middle, 0.35 * advantage if advantage > 0 else -1.65, "gradient\nis zero", color="0.3", ha="center")
    axes.plot(ratio, ratio * advantage, color="#D55E00", ls=":", lw=2, label="unclipped, ratio x A")
    clipped = np.clip(ratio, 1 - clip_eps, 1 + clip_eps) * advantage
    axes.plot(ratio, clipped, color="0.45", ls="--", lw=1.5, label="clipped, clip(ratio) x A")
    axes.plot(ratio, objective(log_ratio), color="#0072B2", lw=3, label="PPO-clip: the lesser of the two")
    axes.plot([1], [advantage], "o", color="black", ms=6)
    axes.annotate("old policy", (1, advantage), (8, -14 if advantage > 0 else 8), textcoords="offset points")
    for edge in (1 - clip_eps, 1 + clip_eps):
        axes.axvline(edge, color="0.7", lw=0.8)
    kind = "good action, A = +1" if advantage > 0 else "bad action, A = -1"
    axes.set(xlabel="ratio new / old probability", ylabel="objective of the sample", xlim=(0, 2), title=kind)


def _number(value: float) -> str:
    return "none" if np.isinf(value) else f"{value:g}"
