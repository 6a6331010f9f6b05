"""What training costs on an accelerator, counted from the program that XLA compiles for one: no accelerator needed.

    python benchmarks/gpu_cost.py [--runs 1 64 1024 4096] [--out benchmarks/results/gpu_cost.md]
    python benchmarks/gpu_cost.py --check      # exit code 1 if the default program costs more than the table says

XLA compiles for an H200 from a description of the chip (h200.txtpb beside this file). `hlo_cost.py` counts what the
compiled program does: kernels, bytes, loops that wait for the host, and the time that kernels and bytes must take at
least. The count is exact and the same on every machine, so that two programs can be compared to the percent; the time
is not a measurement, since without a device XLA tunes nothing.

The compiler is part of what is counted: Python 3.12 or newer, jax 0.11.2 and two wheels of the same version.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import platform
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import hlo_cost
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import purejaxppo as ppo
from purejaxppo import devices

HERE = Path(__file__).parent
TABLE = HERE / "results" / "gpu_cost.md"
VERSION = "0.11.2"
WHEELS = ("jax", "jax-cuda13-plugin", "jax-cuda13-pjrt")
INSTALL = f'pip install "jax=={VERSION}" && pip install --no-deps ' + " ".join(f"{w}=={VERSION}" for w in WHEELS[1:])

UPDATES = 4  # of the compiled program; what it does once a call is a quarter of itself in the figures of an update
PHASES = ("rollout", "estimate", "improve", "diagnostics")
GROWTH = 1.05  # what `--check` lets pass


class Program(NamedTuple):
    """What one update of many runs costs."""

    variant: str
    num_runs: int
    kernels: list[hlo_cost.Kernel]
    waiting: list[str]
    steps: int  # environment steps of all runs in an update

    @property
    def total(self) -> hlo_cost.Cost:
        return per_update(self.kernels)

    def phases(self) -> dict[str, hlo_cost.Cost]:
        """The total in its parts."""
        parts: dict[str, list[hlo_cost.Kernel]] = {phase: [] for phase in (*PHASES, "other")}
        for kernel in self.kernels:
            parts[hlo_cost.phase_of(kernel, PHASES)].append(kernel)
        return {phase: per_update(launched) for phase, launched in parts.items()}


def per_update(launched: Iterable[hlo_cost.Kernel]) -> hlo_cost.Cost:
    """A call's share of each of its updates."""
    return hlo_cost.Cost(*(part / UPDATES for part in hlo_cost.cost_of(launched)))


def missing() -> str | None:
    """What is missing for the count, in one line, or None."""
    if sys.version_info < (3, 12):
        return f"gpu_cost needs Python 3.12 or newer, not {platform.python_version()}; there: {INSTALL}"
    for wheel in WHEELS:
        try:
            found = importlib.metadata.version(wheel)
        except importlib.metadata.PackageNotFoundError:
            found = "missing"
        if found != VERSION:
            return f"gpu_cost needs {wheel} {VERSION}, here {found}: {INSTALL}"
    return None


def variants() -> dict[str, ppo.Config]:
    """The programs to count, all of a few updates of the default run."""
    default = ppo.Config()
    default = dataclasses.replace(default, total_timesteps=UPDATES * default.batch_size)
    programs = {"default": default, "early stopping": dataclasses.replace(default, kl_early_stopping=True)}
    if "compute_dtype" in {field.name for field in dataclasses.fields(ppo.Config)}:
        programs["bfloat16"] = dataclasses.replace(default, compute_dtype="bfloat16")
    return programs


def compile_for_gpu(function: Callable[..., Any], *args: Any) -> str:
    """The scheduled program of an H200, as text.

    Args:
      function: to compile.
      args: arrays, or their shapes.
    """
    chip = (HERE / "h200.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=chip, topology="1x1x1")
    sharding = SingleDeviceSharding(topology.devices[0])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).compile().as_text()


def count(variant: str, config: ppo.Config, num_runs: int) -> Program:
    """Compiles `run` for so many runs, each with its own hyperparameters, and counts what it does."""
    hparams = jax.tree.map(lambda _: jax.ShapeDtypeStruct((num_runs,), jnp.float32), ppo.HParams())
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), num_runs))
    state = jax.eval_shape(jax.vmap(functools.partial(ppo.init, config)), hparams, keys)
    with mock.patch.object(devices, "on_accelerator", return_value=True):  # the program that one would be given
        run = jax.vmap(lambda hparams, state: ppo.run(config, hparams, state, UPDATES))
        text = compile_for_gpu(run, hparams, state)
    module = hlo_cost.parse(text)
    return Program(
        variant, num_runs, hlo_cost.kernels(module), hlo_cost.waiting_loops(module), num_runs * config.batch_size
    )


def cells(cost: hlo_cost.Cost) -> str:
    """Of a row of a table."""
    return f"{cost.num_kernels:,.1f} | {cost.num_bytes / 1e9:.2f} | {cost.seconds * 1e3:.2f}"


def totals(programs: Iterable[Program]) -> list[str]:
    """A table of the programs, a line each."""
    lines = [
        "| program | runs | kernels | GB | predicted ms | million steps/s | loops that wait for the host |",
        "|---|---|---|---|---|---|---|",
    ]
    for program in programs:
        speed = program.steps / program.total.seconds / 1e6
        waiting = ", ".join(program.waiting) or "none"
        lines.append(f"| {program.variant} | {program.num_runs:,} | {cells(program.total)} | {speed:.1f} | {waiting} |")
    return lines


def by_phase(programs: Iterable[Program]) -> list[str]:
    """A table of the programs' phases."""
    lines = ["| program | runs | phase | kernels | GB | predicted ms | share |", "|---|---|---|---|---|---|---|"]
    for program in programs:
        for phase, cost in program.phases().items():
            share = cost.seconds / program.total.seconds
            lines.append(f"| {program.variant} | {program.num_runs:,} | {phase} | {cells(cost)} | {share:.0%} |")
    return lines


def worst(program: Program, num: int = 10) -> list[str]:
    """A table of the kernels that take longest, a line each."""
    lines = ["| share | times an update | MB | kind | phase | operation |", "|---|---|---|---|---|---|"]
    for kernel in sorted(program.kernels, key=lambda kernel: kernel.seconds, reverse=True)[:num]:
        share = per_update([kernel]).seconds / program.total.seconds
        phase = hlo_cost.phase_of(kernel, PHASES)
        where = "/".join(kernel.op_name.split("/")[-3:])
        lines.append(
            f"| {share:.1%} | {kernel.times / UPDATES:g} | {kernel.num_bytes / 1e6:.1f} | {kernel.kind} | {phase} "
            f"| `{where or kernel.name}` |"
        )
    return lines


def page(programs: list[Program]) -> str:
    """All tables, as the file that is kept."""
    versions = ", ".join(f"{wheel} {importlib.metadata.version(wheel)}" for wheel in WHEELS)
    floor = f"bytes / {hlo_cost.BANDWIDTH / 1e12:g} TB/s and {hlo_cost.LAUNCH * 1e6:g} us a launch"
    text = [
        "# Cost on an accelerator, by accounting",
        "",
        "Counted, not measured, from the program that XLA compiles for an H200: `python benchmarks/gpu_cost.py`.",
        f"{versions}, Python {platform.python_version()}.",
        "",
        "All figures are of one update of all runs: CartPole, 4 environments x 128 steps, 4 epochs x 4 minibatches,",
        f"two networks of 64-64. They are a {UPDATES}th of those of a call of {UPDATES} updates. Predicted is the sum",
        f"over the kernels of the larger of {floor}; real kernels take longer.",
        "",
        *totals(programs),
        "",
        "## Phases",
        "",
        *by_phase(programs),
    ]
    for program in programs:
        if program.num_runs == max(each.num_runs for each in programs):
            text += ["", f"## The worst ten kernels: {program.variant}, {program.num_runs:,} runs", "", *worst(program)]
    return "\n".join(text) + "\n"


def read_totals(text: str) -> dict[tuple[str, int], tuple[float, float]]:
    """(kernels, GB) of an update by (program, runs), from the table of totals of a page."""
    rows = re.findall(r"^\| ([\w ]+) \| ([\d,]+) \| ([\d,.]+) \| ([\d.]+) \| [\d.]+ \| [\d.]+ \|", text, re.MULTILINE)
    return {
        (variant, int(runs.replace(",", ""))): (float(launched.replace(",", "")), float(gigabytes))
        for variant, runs, launched, gigabytes in rows
    }


def growth(program: Program, text: str) -> list[str]:
    """What of the program costs more than the page says, beyond the tolerance: a line each, none if all is well.

    Raises:
      ValueError: if the page has no such program.
    """
    kept = read_totals(text).get((program.variant, program.num_runs))
    if kept is None:
        raise ValueError(f"the table has no program {program.variant!r} of {program.num_runs} runs")
    now = (program.total.num_kernels, program.total.num_bytes / 1e9)
    return [
        f"{name} of an update: {new:,.1f}, {new / old - 1:+.1%} over the {old:,.1f} of the table"
        for name, new, old in zip(("kernels", "GB"), now, kept, strict=True)
        if new > GROWTH * old
    ]


def main(arguments: list[str] | None = None) -> int:
    """Counts and prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 64, 1024, 4096])
    parser.add_argument("--variants", nargs="+", default=list(variants()), choices=list(variants()))
    parser.add_argument("--check", action="store_true", help="compare the default program of 4096 runs with the table")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if problem := missing():
        print(problem, file=sys.stderr)
        return 2
    jax.config.update("jax_platforms", "cpu")  # the plugin compiles; it need not find a device
    if options.check:
        grown = growth(count("default", variants()["default"], 4096), TABLE.read_text())
        print("\n".join(grown) or "kernels and bytes of the default program are within the table")
        return 1 if grown else 0

    programs = []
    for variant in options.variants:
        for num_runs in options.runs if variant == "default" else [max(options.runs)]:
            programs.append(count(variant, variants()[variant], num_runs))
            print(totals(programs)[-1], file=sys.stderr, flush=True)
    text = page(programs)
    print(text)
    if options.out:
        options.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
