"""How much memory sweeps take, and what cutting them into chunks costs.

    python benchmarks/sweeps.py [--seeds 128 1024 4096] [--repeats 3] [--out benchmarks/results/sweeps.md]

Each measurement is a process of its own: seeds of a short CartPole run (10,240 steps), in the chunks that `sweep` makes
of them, in one chunk, and in those chunks with a directory. Peak memory is the process's largest resident set; most of
it is the compiler's, and differs by some tens of MiB from process to process, so the peak after the first chunk stands
beside the one at the end.
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

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10

    peaks = {}
    ppo.use_all_cores()
    with tempfile.TemporaryDirectory() as folder:
        result = ppo.sweep(
            ppo.Config(total_timesteps=10_240),
            ppo.HParams(learning_rate=1e-3),
            num_seeds,
            chunk_size=num_seeds if way == 1 else None,
            directory=folder if way == 2 else None,
            progress=lambda report: peaks.setdefault(report.num_runs_done, peak()),
        )
    return {
        "chunks": len(result.plan.places),
        "speed": result.steps_per_second,
        "first": min(peaks[done] for done in peaks if done),
        "memory": peak(),
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
        "| seeds | how | chunks | peak MiB after the first chunk | at the end | results MiB | environment steps/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for (seeds, way), measured in results.items():
        first, last, speed = (spread([m[name] for m in measured]) for name in ("first", "memory", "speed"))
        chunks, size = measured[0]["chunks"], measured[0]["results"]
        lines.append(f"| {seeds:,} | {WAYS[way]} | {chunks} | {first} | {last} | {size:.1f} | {speed} |")
    print("\n".join(lines))
    if arguments.out:
        arguments.out.write_text("# Sweeps\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
