"""Every peer on the same work, side by side with ours on this machine.

    python benchmarks/peers.py [--peers rejax sbx sb3] [--purejaxrl CHECKOUT] [--parts speed start] [--quick]

That takes about 12 minutes on two quiet cores without a checkout; with one each part takes about 10.

The work: CartPole, 64-64 tanh actor and critic, 4 environments x 128 steps, 4 epochs x 4 minibatches, the same
learning rate, clip range, discount and gradient bound. Peers are installed below `--folder` the first time, each in a
virtual environment of its own; one that cannot be installed is a row that says why. Parts:

    speed   environment steps/s of compiled calls, compile seconds, peak memory; 1 to 1024 runs where the peer trains
            many as one program. All trainers of a row are compiled first, then take turns.
    start   seconds from the start of the process to its end with the result of 16 runs x 100k steps, with an empty
            compilation cache and once more with the same one.
    memory  peak memory of 256 runs x 500k steps, and of 256 runs of two updates. Needs no quiet machine. A training is
            ended after `--memory-seconds`: what it returns is allocated when it begins, though more may be at its end.

Ratios are taken within a turn, so that a machine whose speed drifts slows both sides. Each part's rows replace those
of an earlier call in `--out`, which holds the JSON; the table is written beside it.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peers_table import MEMORY, START, Row, report
from side_by_side import ROOT, TRAINERS, TrainerError, Training, default_folder, install, versions

PEERS = [name for name in TRAINERS if name != "ours"]
SPEED_RUNS = (1, 64, 256, 1024)
UPDATES = {1: 600, 64: 16, 256: 6, 1024: 2}  # of each run in a call, so that a call lasts seconds
STEPWISE_UPDATES = 10  # where every environment step is a call of Python
BATCH = 512


def main() -> None:
    arguments = parse()
    ready, missing = installed(arguments.peers, arguments.folder)
    checkout = {"checkout": str(arguments.purejaxrl)} if arguments.purejaxrl else {}
    about = {"versions": {name: versions(name, arguments.folder) for name in ready}, "machine": machine()}
    for part in arguments.parts:
        document = about | {"rows": missing + PARTS[part](ready, arguments, checkout)}
        document = merged(json.loads(arguments.out.read_text()) if arguments.out.exists() else None, document)
        text = report(document)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
        arguments.out.with_suffix(".md").write_text(text)
    print(text)


def machine() -> str:
    """Where this is measured. Asked in another process: what JAX takes here would count in the workers' memory."""
    code = "from purejaxppo.host import files; print(files.machine())"
    finished = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    return finished.stdout.strip()


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The arguments; leaves the process with one line if they are wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", nargs="+", metavar="NAME", help=f"of {', '.join(PEERS)}; default: all there are")
    parser.add_argument("--purejaxrl", type=Path, metavar="CHECKOUT", help="a checkout of PureJaxRL")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=["speed", "start"])
    parser.add_argument("--folder", type=Path, default=default_folder(), help="where peers are installed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--memory-seconds", type=float, default=300, help="that a training of the part `memory` may take"
    )
    parser.add_argument("--quick", action="store_true", help="tiny work, to see that everything runs")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "peers.json")
    arguments = parser.parse_args(words)
    if arguments.peers is None:
        arguments.peers = [name for name in PEERS if name != "purejaxrl" or arguments.purejaxrl]
    for name in arguments.peers:
        if name not in PEERS:
            parser.error(f"argument --peers: there is no peer {name!r}; allowed: {', '.join(PEERS)}")
    if "purejaxrl" in arguments.peers and arguments.purejaxrl is None:
        parser.error("argument --peers: purejaxrl needs --purejaxrl CHECKOUT")
    if arguments.purejaxrl and not (arguments.purejaxrl / "purejaxrl" / "ppo.py").is_file():
        parser.error(f"argument --purejaxrl: {arguments.purejaxrl} holds no purejaxrl/ppo.py")
    if arguments.repeats < 1:
        parser.error(f"argument --repeats: {arguments.repeats} must be at least 1")
    return arguments


def installed(peers: list[str], folder: Path) -> tuple[list[str], list[Row]]:
    """The trainers that are ready, ours first, and a row for each that is not."""
    ready, rows = ["ours"], []
    for name in peers:
        try:
            install(name, folder)
            ready.append(name)
        except TrainerError as error:
            rows.append({"part": "install", "trainer": name, "runs": 0, "failed": str(error)})
    return ready, rows


def speed(ready: list[str], arguments: argparse.Namespace, checkout: dict[str, str]) -> list[Row]:
    """Rows of the part `speed`."""
    rows: list[Row] = []
    for runs in SPEED_RUNS[: 2 if arguments.quick else None]:
        with contextlib.ExitStack() as stack:
            trainings, mine = {}, {}
            for name in ready:
                if runs > 1 and not TRAINERS[name].single_jit:
                    continue
                updates = 2 if arguments.quick else UPDATES[runs] if TRAINERS[name].single_jit else STEPWISE_UPDATES
                work = {"num_runs": runs, "total_timesteps": updates * BATCH} | checkout
                mine[name] = {"part": "speed", "trainer": name, "runs": runs, "steps": runs * updates * BATCH}
                trainings[name] = stack.enter_context(Training(name, arguments.folder, **work))
            take_turns(trainings, mine, arguments.repeats)
            rows += mine.values()
    return rows


def take_turns(trainings: dict[str, Training], rows: dict[str, Row], repeats: int) -> None:
    """Lets each train once to compile, and then all of them in turn; fills their rows in."""
    first: dict[str, float] = {}
    for turn in range(repeats + 1):
        for name in rotated([name for name in trainings if "failed" not in rows[name]], turn):
            row = rows[name]
            try:
                answer = trainings[name].train(turn)
            except TrainerError as error:
                row["failed"] = str(error)
                continue
            if turn == 0:
                first[name], row["compile"], row["seconds"] = answer["seconds"], answer.get("compile"), []
            else:
                row["seconds"].append(answer["seconds"])
            row["memory"] = answer["memory"]
            print(name, row["runs"], answer, file=sys.stderr, flush=True)
    for name, row in rows.items():
        if "failed" not in row and row["compile"] is None:
            row["compile"] = first[name] - statistics.median(row["seconds"])


def rotated(names: list[str], turn: int) -> list[str]:
    """The names in another order each turn, so that nobody always comes first."""
    start = turn % max(1, len(names))
    return names[start:] + names[:start]


def start(ready: list[str], arguments: argparse.Namespace, checkout: dict[str, str]) -> list[Row]:
    """Rows of the part `start`."""
    names = [name for name in ready if TRAINERS[name].single_jit]
    rows: dict[str, Row] = {
        name: {"part": "start", "trainer": name, "runs": START["num_runs"], "cold": [], "warm": []} for name in names
    }
    for turn in range(arguments.repeats):
        for name in rotated([name for name in names if "failed" not in rows[name]], turn):
            with tempfile.TemporaryDirectory() as cache:
                try:
                    for kind in ("cold", "warm"):
                        rows[name][kind].append(once(name, cache, arguments, checkout))
                except TrainerError as error:
                    rows[name]["failed"] = str(error)
            print(name, rows[name], file=sys.stderr, flush=True)
    return list(rows.values())


def once(name: str, cache: str, arguments: argparse.Namespace, checkout: dict[str, str]) -> float:
    """Seconds from the start of a process to its end, all programs being kept in the compilation cache."""
    settings = {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    work = START | ({"total_timesteps": 2 * BATCH} if arguments.quick else {}) | checkout
    started = time.perf_counter()
    with Training(name, arguments.folder, settings, **work) as training:
        training.train(0)
        training.end()
        return time.perf_counter() - started


def memory(ready: list[str], arguments: argparse.Namespace, checkout: dict[str, str]) -> list[Row]:
    """Rows of the part `memory`."""
    rows = []
    for name in [name for name in ready if TRAINERS[name].single_jit]:
        row: Row = {"part": "memory", "trainer": name, "runs": MEMORY["num_runs"]}
        few = MEMORY | {"total_timesteps": 2 * BATCH} | checkout
        many = (few if arguments.quick else MEMORY) | checkout
        try:
            with Training(name, arguments.folder, timeout=7200, **few) as training:
                row["few"] = training.train(0)["memory"]
            with Training(name, arguments.folder, timeout=7200, **many) as training:
                row["memory"], row["finished"] = training.peak(0, arguments.memory_seconds)
        except TrainerError as error:
            row["failed"] = str(error)
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
    return rows


PARTS = {"speed": speed, "start": start, "memory": memory}


def merged(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """The new document with those parts of the old one that were not measured again."""
    if old is None:
        return new
    parts = {row["part"] for row in new["rows"]} | {"install"}
    kept = [row for row in old["rows"] if row["part"] not in parts]
    return new | {"versions": old["versions"] | new["versions"], "rows": kept + new["rows"]}


if __name__ == "__main__":
    main()
