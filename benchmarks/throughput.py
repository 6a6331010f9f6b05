"""How fast many runs train, with and without spreading them over the cores.

    python benchmarks/throughput.py [--runs 1 16 64 256] [--repeats 3] [--out benchmarks/results/throughput.md]

Each measurement is a process of its own: the default CartPole (64-64 tanh actor and critic, 4 environments x 128
steps, 4 epochs x 4 minibatches), sharded over one XLA device per core or on one device. Sharded and not alternate,
so that a machine whose speed drifts slows both. Steps per second are those of a second, compiled call; compile
seconds are the first call's. At the end the command of the README is started cold, once a repeat.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def measure(num_runs: int, sharded: bool, total_steps: int) -> dict[str, float]:
    """One measurement, in this process."""
    import purejaxppo as ppo

    if sharded:
        ppo.use_all_cores()
    updates = max(20, total_steps // (num_runs * 512))
    config = ppo.Config(total_timesteps=512 * updates)
    hparams = ppo.HParams(learning_rate=1e-3)
    first = ppo.sweep(config, hparams, num_runs)
    second = ppo.sweep(config, hparams, num_runs)
    return {
        "compile": first.compile_seconds,
        "speed": second.steps_per_second,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
    }


def in_process(*arguments: str) -> dict[str, float]:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--measure", *arguments]
    finished = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(finished.stdout.splitlines()[-1])


def cold_start() -> dict[str, float]:
    """Seconds of `purejaxppo train configs/cartpole.toml`: importing and compiling apart from training."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "purejaxppo.host.cli",
            "train",
            "configs/cartpole.toml",
            "--out",
            f"{folder}/run",
        ]
        started = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        total = time.perf_counter() - started
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
    return {
        "total": total,
        "compile": summary["compile_seconds"],
        "run": summary["run_seconds"],
        "rest": total - summary["compile_seconds"] - summary["run_seconds"],
    }


def spread(values: list[float], form: str = ",.0f") -> str:
    """Median, and the range."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def versions() -> str:
    """What was measured, and where."""
    import jax

    from purejaxppo.host import files

    return f"jax {jax.__version__}, Python {platform.python_version()}, {files.machine()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1_500_000, help="environment steps of a measurement, all runs")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        num_runs, sharded, steps = map(int, arguments.measure)
        print(json.dumps(measure(num_runs, bool(sharded), steps)))
        return

    results = {(runs, sharded): [] for runs in arguments.runs for sharded in (1, 0)}
    for _ in range(arguments.repeats):
        for (runs, sharded), measured in results.items():
            measured.append(in_process(str(runs), str(sharded), str(arguments.steps)))
            print(runs, "sharded" if sharded else "one device", measured[-1], file=sys.stderr, flush=True)
    cold = [cold_start() for _ in range(arguments.repeats)]

    lines = [
        f"Medians of {arguments.repeats} alternations (and their range). {versions()}.",
        "",
        "| runs | devices | environment steps/s | seconds per run and 500k steps | compile s | peak memory MiB |",
        "|---|---|---|---|---|---|",
    ]
    for (runs, sharded), measured in results.items():
        speeds = [m["speed"] for m in measured]
        lines.append(
            f"| {runs} | {'one per core' if sharded else 'one'} | {spread(speeds)} "
            f"| {500_000 / statistics.median(speeds):.2f} | {spread([m['compile'] for m in measured], '.1f')} "
            f"| {spread([m['memory'] for m in measured])} |"
        )
    lines.append("")
    for runs in arguments.runs:
        pairs = zip(results[runs, 1], results[runs, 0], strict=True)
        ratios = [sharded["speed"] / one["speed"] for sharded, one in pairs]
        lines.append(f"- {runs} runs: one device per core is {spread(ratios, '.2f')} times one device.")
    if {64, 256} <= set(arguments.runs):
        pairs = zip(results[256, 1], results[64, 1], strict=True)
        ratios = [many["speed"] / few["speed"] for many, few in pairs]
        lines.append(f"- A run among 256 costs {spread([1 / ratio for ratio in ratios], '.2f')} times a run among 64.")
    lines.append(
        f"- `purejaxppo train configs/cartpole.toml` from a cold start: {spread([c['total'] for c in cold], '.1f')} s, "
        f"of which compiling {spread([c['compile'] for c in cold], '.1f')}, "
        f"training {spread([c['run'] for c in cold], '.1f')}, "
        f"and importing, statistics and the picture {spread([c['rest'] for c in cold], '.1f')}."
    )
    print("\n".join(lines))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text("# Throughput\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
