"""Speed of RLHF on token sequences: compile seconds, updates/s and tokens/s of one run and of many together.

python benchmarks/tokens.py [--out benchmarks/results/tokens.md] [--num-runs 24] [--num-updates 40]
"""

import argparse
import time
from pathlib import Path

import jax
import numpy as np

import purejaxppo as ppo
from purejaxppo.host import files
from purejaxppo.tokens.config import TokenConfig, TokenHParams
from purejaxppo.tokens.segments import CAPACITY, Own, Runs

CAPTION = """One after another: one run on one device, times as many. Together: `tokens.segments.Runs`, blocks of runs
side by side on every local device. Both are compiled before the clock starts; the best of three repeats counts."""
SETTINGS = {
    "enum, 1 x 32, 128 responses": TokenConfig(task="enum", batch_size=128),
    "token-count, 1 x 32, 64 responses": TokenConfig(task="token-count", batch_size=64),
    "token-count, 2 x 64, 64 responses": TokenConfig(
        task="token-count", batch_size=64, task_params=(("num_layers", 2), ("width", 64))
    ),
}


def measure(config: TokenConfig, num_runs: int, num_updates: int) -> tuple[float, float, float]:
    """(compile seconds, updates/s, tokens/s) of all runs together."""
    hparams = TokenHParams(*(np.full(num_runs, leaf, np.float32) for leaf in TokenHParams()))
    runs = Runs(config, None, Own(hparams))
    started = time.perf_counter()
    state = runs.start(jax.vmap(jax.random.key)(np.arange(num_runs)))
    state, _ = runs.advance(state, 1)
    compile_seconds, best, tokens = time.perf_counter() - started, np.inf, 0.0
    for _ in range(3):
        started = time.perf_counter()
        state, metrics = runs.advance(state, num_updates)
        best = min(best, time.perf_counter() - started)
        tokens = float(metrics.length.sum()) * config.batch_size
    return compile_seconds, num_runs * num_updates / best, tokens / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--num-runs", type=int, default=24)
    parser.add_argument("--num-updates", type=int, default=40)
    arguments = parser.parse_args()
    if arguments.num_updates > CAPACITY:
        parser.error(f"--num-updates: at most {CAPACITY}")
    ppo.use_all_cores()
    lines = [
        "# RLHF on token sequences",
        "",
        f"{files.machine()}, jax {jax.__version__}. {' '.join(CAPTION.split())}",
        "",
        "| setting | runs | compile (s) | updates/s | tokens/s | together / one after another |",
        "|---|---|---|---|---|---|",
    ]
    for name, config in SETTINGS.items():
        alone = measure(config, 1, arguments.num_updates)
        together = measure(config, arguments.num_runs, arguments.num_updates)
        for num, (compiled, updates, tokens) in ((1, alone), (arguments.num_runs, together)):
            ratio = f"{updates / alone[1]:.1f}" if num > 1 else ""
            lines.append(f"| {name} | {num} | {compiled:.1f} | {updates:,.0f} | {tokens:,.0f} | {ratio} |")
            print(lines[-1], flush=True)
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
