"""The tables of `peers.py`, from what it measured."""

import statistics
from collections.abc import Callable
from typing import Any

from side_by_side import TRAINERS
from throughput import spread

Row = dict[str, Any]  # part, trainer, runs; then what was measured, or "failed" and why
Ratios = Callable[[Row, Row], list[float]]  # (ours, peer) -> how many times as fast ours is, turn by turn

START = {"num_runs": 16, "total_timesteps": 100_000}
NOISE = 50.0  # MiB that the peak of the same process differs by from start to start
MEMORY = {"num_runs": 256, "total_timesteps": 500_000}
NOTES = (
    "CartPole, 64-64 tanh actor and critic, 4 environments x 128 steps, 4 epochs x 4 minibatches. Each trainer as it "
    "is documented (`workers/`), rejax with its evaluations off; ours is `sweep`, timed from call to return. sb3 and "
    "sbx train one run, a few updates a call. In the part on starting, every trainer has JAX's compilation cache. "
    "Compile seconds are of one start. Figures with a range are medians over the turns, ratios those within a turn."
)
RETURNS = {
    "ours": "metrics of every update",
    "rejax": "final states",
    "purejaxrl": "metrics of every environment step",
}


def report(document: dict[str, Any]) -> str:
    """The document as Markdown."""
    rows = document["rows"]
    lines = [
        "# Peers",
        "",
        f"{document['machine']}. {NOTES}",
        "",
        *(f"- {name}: {text}" for name, text in document["versions"].items()),
        *(f"- {row['trainer']}: not installed: {row['failed']}" for row in rows if row["part"] == "install"),
    ]
    for part, table in (("speed", speed_table), ("start", start_table), ("memory", memory_table)):
        measured = [row for row in rows if row["part"] == part]
        if measured:
            lines += ["", *table(measured)]
    return "\n".join(lines) + "\n"


def speed_table(rows: list[Row]) -> list[str]:
    """Lines of the part `speed`."""
    lines = [
        f"Compiled calls, {max(len(row.get('seconds', [])) for row in rows)} turns:",
        "",
        "| runs | trainer | environment steps/s | ours is times as fast | compile s | peak memory MiB |",
        "|---|---|---|---|---|---|",
    ]
    closing = []
    for runs in sorted({row["runs"] for row in rows}):
        here = {row["trainer"]: row for row in rows if row["runs"] == runs}
        for name, row in here.items():
            if "failed" in row:
                lines.append(f"| {runs} | {name} | failed: {row['failed']} | | | |")
                continue
            ratios = faster(here["ours"], row)
            lines.append(
                f"| {runs} | {name} | {spread(speeds(row))} | {spread(ratios, '.2f') if ratios else '-'} "
                f"| {row['compile']:.1f} | {row['memory']:,.0f} |"
            )
        closing += [f"- {runs} runs: ours is {text}" for text in against_fastest(here, speeds, faster)]
    ours = {row["runs"]: row for row in rows if row["trainer"] == "ours" and "failed" not in row}
    if {64, 1024} <= set(ours):
        costs = [few / many for few, many in zip(speeds(ours[64]), speeds(ours[1024]), strict=True)]
        closing.append(f"- A run of ours among 1024 costs {spread(costs, '.2f')} times a run among 64.")
    return [*lines, "", *closing]


def speeds(row: Row) -> list[float]:
    """Environment steps per second of each turn, of all runs together."""
    return [row["steps"] / seconds for seconds in row["seconds"]]


def faster(ours: Row, peer: Row) -> list[float]:
    """How many times as fast as the peer ours is, turn by turn; nothing of ours itself or if either failed."""
    if ours is peer or "failed" in ours or "failed" in peer:
        return []
    return [mine / other for mine, other in zip(speeds(ours), speeds(peer), strict=True)]


def against_fastest(here: dict[str, Row], measure: Callable[[Row], list[float]], ratio: Ratios) -> list[str]:
    """One line on the fastest of the peers that train many runs as one program; none if there is no such peer."""
    peers = [row for name, row in here.items() if name != "ours" and TRAINERS[name].single_jit]
    peers = [row for row in peers if ratio(here["ours"], row)]
    if not peers:
        return []
    best = max(peers, key=lambda row: statistics.median(measure(row)))
    return [f"{spread(ratio(here['ours'], best), '.2f')} times the fastest single-jit peer ({best['trainer']})."]


def start_table(rows: list[Row]) -> list[str]:
    """Lines of the part `start`."""
    here = {row["trainer"]: row for row in rows}
    lines = [
        f"From the start of the process to its end, {START['num_runs']} runs x {START['total_timesteps']:,} steps, "
        f"{len(here['ours']['cold'])} turns:",
        "",
        "| trainer | cold s | ours is times as fast | warm cache s | ours is times as fast |",
        "|---|---|---|---|---|",
    ]
    for name, row in here.items():
        if "failed" in row:
            lines.append(f"| {name} | failed: {row['failed']} | | | |")
            continue
        ratios = {kind: starts_faster(kind)(here["ours"], row) for kind in ("cold", "warm")}
        cells = [
            cell
            for kind in ("cold", "warm")
            for cell in (spread(row[kind], ".1f"), spread(ratios[kind], ".2f") if ratios[kind] else "-")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append("")
    for kind in ("cold", "warm"):
        texts = against_fastest(here, lambda row, kind=kind: [-x for x in row[kind]], starts_faster(kind))
        lines += [f"- {kind.capitalize()}: ours is {text}" for text in texts]
    return lines


def starts_faster(kind: str) -> Ratios:
    """As `faster`, of seconds until the end."""

    def ratios(ours: Row, peer: Row) -> list[float]:
        if ours is peer or "failed" in ours or "failed" in peer:
            return []
        return [other / mine for mine, other in zip(ours[kind], peer[kind], strict=True)]

    return ratios


def memory_table(rows: list[Row]) -> list[str]:
    """Lines of the part `memory`."""
    here = {row["trainer"]: row for row in rows}
    lines = [
        f"Largest resident set of the process, {MEMORY['num_runs']} runs:",
        "",
        f"| trainer | MiB, {MEMORY['total_timesteps']:,} steps | times ours | MiB, two updates | difference "
        "| times ours | returns |",
        "|---|---|---|---|---|---|---|",
    ]
    ours = here["ours"]
    for name, row in here.items():
        if "failed" in row or "failed" in ours:
            lines.append(f"| {name} | failed: {row.get('failed', 'ours did')} | | | | | |")
            continue
        grown, ours_grown = row["memory"] - row["few"], ours["memory"] - ours["few"]
        whole = f"{'' if row['finished'] else 'at least '}{row['memory']:,.0f}"
        lines.append(
            f"| {name} | {whole} | {row['memory'] / ours['memory']:.1f} | {row['few']:,.0f} | {grown:,.0f} "
            f"| {_times(grown, ours_grown)} | {RETURNS[name]} |"
        )
    if "purejaxrl" not in here:
        lines += ["", "No trainer that returns metrics of every step was measured: no checkout of PureJaxRL was given."]
    return lines


def _times(grown: float, ours: float) -> str:
    """How many times as much one grew, as far as that is more than what the same process differs by."""
    if grown < NOISE:
        return "-"
    return f"over {grown / NOISE:.0f}" if ours < NOISE else f"{grown / ours:.1f}"
