"""How much memory sweeps take, and what cutting them into chunks costs.

    python benchmarks/sweeps.py [--seeds 128 1024 4096] [--repeats 3] [--out benchmarks/results/sweeps.md]

Each measurement is a process of its own: seeds of a short CartPole run (20,480 steps), in the chunks that `sweep` makes
of them, in one chunk, and in those chunks with a directory. Peak memory is the process's largest resident set.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from throughput import ROOT, spread, versions

WAYS = ("chunks", "one chunk", "chunks, kept in a directory")


def measure(num_seeds: int, way: int) -> dict[str, float]:
    """One measurement, in this process."""
    import purejaxppo as ppo
    from purejaxppo.sweep import num_bytes_of_metrics

    ppo.use_all_cores()
    with tempfile.TemporaryDirectory() as folder:
        result = ppo.sweep(
            ppo.Config(total_timesteps=20_480),
            ppo.HParams(learning_rate=1e-3),
            num_seeds,
            chunk_size=num_seeds if way == 1 else None,
            directory=folder if way == 2 else None,
        )
    return {
        "chunks": len(result.plan.places),
        "speed": result.steps_per_second,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
        "results": num_bytes_of_metrics(result.plan) / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", nargs=2, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(*arguments.measure)))
        return

    results = {(seeds, way): [] for seeds in arguments.seeds for way in range(len(WAYS))}
    for _ in range(arguments.repeats):
        for (seeds, way), measured in results.items():
            command = [sys.executable, __file__, "--measure", str(seeds), str(way)]
            finished = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
            measured.append(json.loads(finished.stdout.splitlines()[-1]))
            print(seeds, WAYS[way], measured[-1], file=sys.stderr, flush=True)

    lines = [
        f"Medians of {arguments.repeats} alternations (and their range). {versions()}.",
        "",
        "| seeds | how | chunks | peak memory MiB | of it results MiB | environment steps/s |",
        "|---|---|---|---|---|---|",
    ]
    for (seeds, way), measured in results.items():
        lines.append(
            f"| {seeds:,} | {WAYS[way]} | {measured[0]['chunks']} | {spread([m['memory'] for m in measured])} "
            f"| {measured[0]['results']:.1f} | {spread([m['speed'] for m in measured])} |"
        )
    print("\n".join(lines))
    if arguments.out:
        arguments.out.write_text("# Sweeps\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
