"""Bandit runs per minute, and the ratio to a vectorised NumPy twin on the same machine.

    python benchmarks/bandit.py [--num-seeds 1000000] [--twin-seeds 20000]

A seed is two whole runs of the text's default demo (20 iterations of 12 pulls and 40 ascent steps), one without the
clip and one with it. Seeds are streamed in chunks over all cores and reduced as they come, so that memory does not grow
with their number. The twin is NumPy in float32 on one core, in blocks that fit the cache. Compilation is timed apart.
The processor seconds say what a busy machine hides. Nothing here asserts a time.
"""

import argparse
import math
import resource
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from purejaxppo import bandit, use_all_cores
from purejaxppo.bandit import BanditConfig, BanditHParams, BanditTrace

CONFIG = BanditConfig()
HPARAMS = BanditHParams(clip_eps=(math.inf, 0.2))
TWIN_BLOCK = 512


class Final(NamedTuple):
    wrong: Any
    expected_reward: Any


def final(trace: BanditTrace) -> Final:
    means = np.asarray(HPARAMS.means, np.float32)
    return Final(bandit.on_wrong_arm(trace.policy[-1], means), trace.expected_reward[-1])


def whole(trace: BanditTrace) -> BanditTrace:
    return trace


def run(num_seeds: int, seed: int) -> Final:
    """Share on a wrong arm and mean expected reward of both learners, in bounded memory."""
    sums = np.zeros((2, 2))
    for chunk in bandit.stream_seeds(CONFIG, HPARAMS, num_seeds, seed, final):
        sums += [chunk.wrong.sum(axis=1), chunk.expected_reward.sum(axis=1, dtype=np.float64)]
    return Final(*sums / num_seeds)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def twin_block(num_seeds: int, clip_eps: float, generator: np.random.Generator) -> np.ndarray:
    """Final policies [num_seeds, A] of one learner, all seeds at once; the same sums over arms as `bandit.ascend`."""
    means, one = np.asarray(HPARAMS.means, np.float32), np.float32(1)
    logits = np.zeros((num_seeds, len(means)), np.float32)
    rate, low, high = np.float32(HPARAMS.learning_rate), np.float32(1 - clip_eps), np.float32(1 + clip_eps)
    for _ in range(CONFIG.num_iterations):
        uniforms = generator.random((num_seeds, CONFIG.num_pulls), np.float32)
        normals = generator.standard_normal((num_seeds, CONFIG.num_pulls), np.float32)
        old = log_softmax(logits)
        cumulative = np.cumsum(np.exp(old), axis=-1)[:, None, :-1]
        actions = (uniforms[..., None] >= cumulative).sum(axis=-1)
        rewards = means[actions] + np.float32(HPARAMS.reward_std) * normals
        advantages = rewards - rewards.mean(axis=-1, keepdims=True)
        arms = np.eye(len(means), dtype=np.float32)[actions]
        gain = np.einsum("sn,sna->sa", np.maximum(advantages, 0), arms) / CONFIG.num_pulls
        loss = np.einsum("sn,sna->sa", np.minimum(advantages, 0), arms) / CONFIG.num_pulls
        pulled, log_probs = arms.any(axis=1), old
        for _ in range(CONFIG.num_epochs):
            ratio = np.exp(np.where(pulled, log_probs - old, 0 * one))
            slope = ratio * (gain * (ratio <= high) + loss * (ratio >= low))
            logits = logits + rate * (slope - np.exp(log_probs) * slope.sum(axis=-1, keepdims=True))
            log_probs = log_softmax(logits)
    return np.exp(log_probs)


def run_twin(num_seeds: int, seed: int) -> Final:
    """The same figures from NumPy."""
    means, figures = np.asarray(HPARAMS.means), []
    for clip_eps in HPARAMS.clip_eps:
        generator = np.random.default_rng(seed)
        sizes = [min(TWIN_BLOCK, num_seeds - first) for first in range(0, num_seeds, TWIN_BLOCK)]
        policy = np.concatenate([twin_block(size, clip_eps, generator) for size in sizes])
        figures.append(((policy.argmax(axis=-1) != means.argmax()).mean(), (policy @ means).mean()))
    return Final(*np.transpose(figures))


def timed(function: Any, *args: Any) -> tuple[Any, float, float]:
    """The result, the wall seconds and the processor seconds of all threads."""
    started, processor_started = time.perf_counter(), time.process_time()
    result = function(*args)
    return result, time.perf_counter() - started, time.process_time() - processor_started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-seeds", type=int, default=1_000_000)
    parser.add_argument("--twin-seeds", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    use_all_cores()

    demo = (CONFIG, HPARAMS, 300, args.seed, whole)
    _, first, _ = timed(bandit.simulate_seeds, *demo)
    again = min(timed(bandit.simulate_seeds, *demo)[1] for _ in range(5))
    print(f"{len(jax.local_devices())} x {jax.devices()[0].device_kind}, jax {jax.__version__}, numpy {np.__version__}")
    print(f"300 seeds, whole traces: {again:.3f} s (compilation {first - again:.1f} s)")

    run(min(args.num_seeds, len(jax.local_devices()) * bandit.CHUNK), args.seed)  # compiles
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ours = timed(run, args.num_seeds, args.seed)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    twin = timed(run_twin, args.twin_seeds, args.seed)
    million = []
    for name, (figures, *seconds), number in (
        ("purejaxppo", ours, args.num_seeds),
        ("NumPy twin", twin, args.twin_seeds),
    ):
        million.append(np.array(seconds) / number * 1e6)
        wall, processor = million[-1]
        print(
            f"{name}: {number} seeds, {60e6 / wall:,.0f} seeds a minute, {processor:.0f} processor seconds a million; "
            f"wrong arm {figures.wrong.round(4)}, expected reward {figures.expected_reward.round(4)} (no clip, clip)"
        )
    wall, processor = million[1] / million[0]
    print(f"ratio: {wall:.1f} in wall time, {processor:.1f} in processor time")
    print(f"peak memory {after / 1024:.0f} MB, {(after - before) / 1024:.0f} MB of it after the first chunk")


if __name__ == "__main__":
    main()
