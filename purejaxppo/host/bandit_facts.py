"""The text's figures on the bandit beside ours: experiments, intervals, agreement. Computes; writes nothing."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from purejaxppo import bandit
from purejaxppo.bandit import BanditConfig, BanditHParams, BanditTrace

TEXT_SEEDS = 300
DETERMINISTIC = 0.99
CLIP_EPS = (math.inf, 0.2, 0.05, 0.5)
NO_CLIP, CLIP, NARROW, WIDE = range(4)

Statistic = Callable[[np.ndarray], np.ndarray]


class Summary(NamedTuple):
    """What is kept of a run.

    Attributes:
      policy: [I+1, A].
      expected_reward: [I+1].
      entropy: [I+1], nats.
      kl: [I], nats.
      first_kl: [K], KL after each step on the first batch, nats.
      wrong: [I+1], whether the most likely arm is not a best one.
    """

    policy: Any
    expected_reward: Any
    entropy: Any
    kl: Any
    first_kl: Any
    wrong: Any


def summarize(trace: BanditTrace) -> Summary:
    """The part of a trace that the figures need."""
    wrong = bandit.on_wrong_arm(trace.policy, np.asarray(BanditHParams().means, np.float32))
    return Summary(trace.policy, trace.expected_reward, trace.entropy, trace.kl, trace.step_kl[0], wrong)


class Experiments(NamedTuple):
    """The runs behind the figures: leaves [settings, seeds, ...].

    Attributes:
      demo: the text's default settings (N=12, K=40), clip_eps of `CLIP_EPS`.
      one_step: the same with K=1, without the clip and with it.
      long: ten times as many iterations, without the clip.
      large_batch: N=64, three iterations, without the clip.
      many_steps: K=100, ten iterations, clip_eps of `CLIP_EPS`.
    """

    demo: Summary
    one_step: Summary
    long: Summary
    large_batch: Summary
    many_steps: Summary


def run_experiments(num_seeds: int, seed: int) -> Experiments:
    """Simulates them all, with seeds 0 to `num_seeds` - 1 of `seed`.

    Raises:
      ValueError: unless `num_seeds` is a positive integer.
    """
    simulate = functools.partial(bandit.simulate_seeds, num_seeds=num_seeds, seed=seed, summarize=summarize)
    no_clip, all_clips = BanditHParams(clip_eps=math.inf), BanditHParams(clip_eps=CLIP_EPS)
    return Experiments(
        demo=simulate(BanditConfig(), all_clips),
        one_step=simulate(BanditConfig(num_epochs=1), BanditHParams(clip_eps=CLIP_EPS[:2])),
        long=simulate(BanditConfig(num_iterations=200), no_clip),
        large_batch=simulate(BanditConfig(num_pulls=64, num_iterations=3), no_clip),
        many_steps=simulate(BanditConfig(num_epochs=100, num_iterations=10), all_clips),
    )


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure of the text and ours.

    Attributes:
      fact: its number in the list of figures.
      what: what is measured.
      text: the figure as the text gives it.
      low: the least value it stands for; below `high` where the text gives a range.
      high: the greatest; inf where the text only says "more than low".
      rounding: half a unit of the last digit that the text prints; 0 where it gives none.
      ours: from all seeds.
      interval: 95% interval of the figure that 300 seeds would give, around ours; None for what no seed changes.
    """

    fact: str
    what: str
    text: str
    low: float
    high: float
    rounding: float
    ours: float
    interval: tuple[float, float] | None

    @property
    def agrees(self) -> str:
        """Whether ours bears it out: "yes" (it is in the interval), "rounded" (one that rounds to it is) or "no"."""
        if self.interval is None:
            return "yes" if abs(self.ours - self.low) <= self.rounding else "no"
        first, last = self.interval
        if math.isinf(self.high):
            return "yes" if first > self.low else "no"
        if self.low <= last and first <= self.high:
            return "yes"
        return "rounded" if self.low - self.rounding <= last and first <= self.high + self.rounding else "no"


def compare(runs: Experiments, seed: int) -> list[Row]:
    """Every figure of the text, in its order."""
    row = functools.partial(_row, seed=seed)
    reward, wrong = runs.demo.expected_reward, runs.demo.wrong
    both = np.stack([reward[NO_CLIP], reward[CLIP]], axis=1)
    long, large = runs.long, runs.large_batch
    stuck = long.wrong[0, :, 20] & (long.policy[0, :, 20].max(axis=-1) >= DETERMINISTIC)
    apart = np.abs(runs.one_step.policy[0] - runs.one_step.policy[1]).max()
    rows = [
        _exact("8", "expected reward at the start", "0.53", 0.53, 0.005, reward[0, 0, 0]),
        row("8", "expected reward after 1, no clip", "0.83", 0.83, 0.005, reward[NO_CLIP, :, 1]),
        row("8", "expected reward after 1, clip", "0.60", 0.60, 0.005, reward[CLIP, :, 1]),
        row("8", "iteration the clip overtakes at", "6 or 7", (6, 7), 0, both, statistic=overtaking),
        row("9", "wrong arm after 20, no clip", "a third", 1 / 3, 0, wrong[NO_CLIP, :, -1]),
        row("9", "wrong arm after 200, no clip", "a third", 1 / 3, 0, long.wrong[0, :, -1]),
        row("9", "stuck (wrong, p >= 0.99) at 20", "a third", 1 / 3, 0, stuck),
        row("9", "their KL in iteration 20, median", "0", 0, 0.005,
            np.where(stuck, long.kl[0, :, 19], np.nan), statistic=median),
        row("9", "of those, still wrong after 200", "all", 1, 0,
            np.where(stuck, long.wrong[0, :, -1], np.nan)),
        _exact("10", "K=1: most the policies differ", "0", 0, 0, apart),
        row("11", "N=64: wrong arm after 3, no clip", "0.08", 0.08, 0.005, large.wrong[0, :, 3]),
        row("11", "N=64: first KL, median", "1.6", 1.6, 0.05, large.kl[0, :, 0], statistic=median),
        row("11", "N=64: runs of first KL > 0.9", "0.9", 0.9, 0.05, large.kl[0, :, 0] > 0.9),
        row("11", "N=64: entropy after 2, median", "0.1", 0.1, 0.05, large.entropy[0, :, 2],
            statistic=median),
        _exact("11", "entropy at the start", "1.10", 1.10, 0.005, large.entropy[0, 0, 0]),
    ]  # fmt: skip
    # The text sets K=100 where it varies the clip (exercise 9.7 d); K=40 is the demo's default.
    for epochs, runs_of in ((100, runs.many_steps), (40, runs.demo)):
        rows += _clip_rows(f"K={epochs}", runs_of, row)
    return rows


def _clip_rows(label: str, runs: Summary, row: Callable[..., Row]) -> list[Row]:
    """Fact 12, at one number of ascent steps."""
    wrong, reward = runs.wrong[:, :, 10], runs.expected_reward[:, :, 10]
    return [
        row("12", f"{label}, eps 0.05: mean KL", "0.01", 0.01, 0.005, runs.kl[NARROW, :, :10].mean(1)),
        row("12", f"{label}, eps 0.5: first KL", "0.2-0.3", (0.2, 0.3), 0.05, runs.kl[WIDE, :, 0]),
        row("12", f"{label}, eps 0.5: wrong after 10", "0.10", 0.10, 0.005, wrong[WIDE]),
        row("12", f"{label}, eps 0.2: wrong after 10", "0.06", 0.06, 0.005, wrong[CLIP]),
        row("12", f"{label}: reward, eps 0.5 above 0.2", "> 0", (0, math.inf), 0.0, reward[WIDE] - reward[CLIP]),
    ]


def interval(data: np.ndarray, statistic: Statistic, seed: int, num_resamples: int = 2000) -> tuple[float, float]:
    """95% percentile bootstrap interval of `statistic`, from resamples of `TEXT_SEEDS` runs.

    With 300 runs this is the ordinary bootstrap. With more it is where the figure of 300 seeds would fall, around a
    centre that the further seeds have made sharp (`scipy.stats.bootstrap` resamples only as many as there are).

    Args:
      data: [num_seeds, ...].
      statistic: [..., num_seeds, ...] -> [...], over axis 1.
      seed: of the resampling.
      num_resamples: how many.

    Returns:
      Its 2.5% and 97.5% quantiles.
    """
    generator = np.random.default_rng(seed)
    draws = [generator.integers(len(data), size=(100, TEXT_SEEDS)) for _ in range(num_resamples // 100)]
    values = np.concatenate([statistic(data[index]) for index in draws])
    values = values[~np.isnan(values)]
    if not values.size:
        return math.nan, math.nan
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def mean(data: np.ndarray) -> np.ndarray:
    """[B, n] -> [B], over the runs that are not NaN; NaN where none is."""
    counted = ~np.isnan(data)
    counts = counted.sum(axis=1)
    totals = np.where(counted, data, 0.0).sum(axis=1, dtype=np.float64)
    return np.divide(totals, counts, out=np.full(len(data), np.nan), where=counts > 0)


def median(data: np.ndarray) -> np.ndarray:
    """[B, n] -> [B], over the runs that are not NaN; NaN where none is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # about a row of NaN, which is foreseen
        return np.nanmedian(data, axis=1)


def overtaking(data: np.ndarray) -> np.ndarray:
    """[B, n, 2, I+1] rewards -> [B] first iteration from which the second mean stays above; I+1 where none is."""
    means = data.mean(axis=1, dtype=np.float64)
    behind = means[:, 1] <= means[:, 0]
    return behind.shape[1] - np.argmax(behind[:, ::-1], axis=1)


def _row(
    fact: str, what: str, text: str, value: float | tuple[float, float], rounding: float, data: np.ndarray, *,
    seed: int, statistic: Statistic = mean,
) -> Row:  # fmt: skip
    low, high = value if isinstance(value, tuple) else (value, value)
    ours = float(statistic(data[None])[0])
    return Row(fact, what, text, low, high, rounding, ours, interval(data, statistic, seed))


def _exact(fact: str, what: str, text: str, value: float, rounding: float, ours: float) -> Row:
    return Row(fact, what, text, value, value, rounding, float(ours), None)
