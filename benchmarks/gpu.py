"""How fast runs train on an accelerator, checked against the CPU: one command, in under ten minutes.

    python benchmarks/gpu.py [--runs 1 64 512 2048 4096] [--variants "default" "bfloat16" ...] [--limit 540]
    python benchmarks/gpu.py --platform cpu --runs 2 --steps 8192 --out /tmp/gpu.md    # tries the script without one

First a few updates of a few runs, with the matrix products in full float32, on the accelerator and on the CPU of this
process: they must agree. Then the default program at every number of runs, largest first, and after it each variant at
the largest. A program is compiled once, for a few updates; the host calls it again and again, each call on the state
of the last one, until the training of 500,000 steps is done. Where that would take over WHOLE seconds, which a few
calls tell beforehand, only those calls are timed, and the table says how many updates they were. What the limit leaves
no time for is left out and named. Every result is appended to a .jsonl file beside the table as soon as it is there, so
that a program that kills the process takes nothing with it.
"""

import argparse
import dataclasses
import functools
import json
import math
import platform
import statistics
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flops import matrix_flops

import purejaxppo as ppo

TABLE = Path(__file__).parent / "results" / "gpu.md"

UPDATES = 8  # of one call of the program
DISCARDED, TIMED = 2, 5  # calls: the first ones still allocate, and record CUDA graphs
WHOLE = 100.0  # s, the longest training that is timed whole; of a variant none is

CHECKED_RUNS, CHECKED_UPDATES = 4, 2
# Of |accelerator - cpu| / (1 + |cpu|). On one machine another order of the sums moves nothing here by more than 3e-7. A
# mistake moves parameters by some learning rates, 2.5e-4 each, or changes an action, and with it whole episodes.
TOLERANCE = 1e-4

BUFFERED = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION"  # XLA's own choice


NOTHING: Mapping[str, Any] = types.MappingProxyType({})


class Variant(NamedTuple):
    """What is changed of the default program."""

    config: Mapping[str, Any] = NOTHING
    generator: str = "threefry2x32"
    precision: str = "default"  # of the matrix products in float32: on recent GPUs TF32
    options: Mapping[str, Any] = NOTHING  # of XLA


class Job(NamedTuple):
    """One line of the table."""

    variant: str
    num_runs: int


def variants() -> dict[str, Variant]:
    """All that this version of the package and of JAX has, by name."""
    found = {"default": Variant(), "highest precision": Variant(precision="highest")}
    if "compute_dtype" in {field.name for field in dataclasses.fields(ppo.Config)}:
        found["bfloat16"] = Variant({"compute_dtype": "bfloat16"})
    found["early stopping"] = Variant({"kl_early_stopping": True})
    for generator in ("philox4x32", "philox2x32", "threefry4x32"):  # those that draw the same under vmap
        if _has_generator(generator):
            found[generator] = Variant(generator=generator)
    return found | {
        "no CUDA graphs": Variant(options={"xla_gpu_enable_command_buffer": ""}),
        "loops in CUDA graphs": Variant(options={"xla_gpu_enable_command_buffer": f"{BUFFERED},WHILE"}),
        "no Triton products": Variant(options={"xla_gpu_enable_triton_gemm": False}),
        "small products as loops": Variant(options={"xla_gpu_gemm_rewrite_size_threshold": "1000"}),
    }


def jobs(numbers: list[int], names: list[str]) -> list[Job]:
    """What is measured, the most important first."""
    default = [Job("default", number) for number in sorted(numbers, reverse=True) if "default" in names]
    return default + [Job(name, max(numbers)) for name in names if name != "default"]


def difference(a: Any, b: Any) -> float:
    """The largest |a - b| / (1 + |b|) over all leaves; infinite where only one of two is NaN."""
    largest = 0.0
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        if (np.isnan(x) != np.isnan(y)).any():
            return math.inf
        apart = np.abs(x - y) / (1 + np.abs(y))
        largest = max(largest, float(np.max(apart, initial=0.0, where=~np.isnan(y))))
    return largest


def train_on(device: jax.Device, config: ppo.Config) -> Any:
    """Parameters and metrics of the checked runs, on the host."""

    def one(hparams: ppo.HParams, key: jax.Array) -> tuple[Any, ppo.Metrics]:
        state, metrics = ppo.run(config, hparams, ppo.init(config, hparams, key), CHECKED_UPDATES)
        return state.params, metrics

    with jax.default_device(device), jax.default_matmul_precision("highest"):
        keys = jax.random.split(jax.random.key(0), CHECKED_RUNS)
        return jax.device_get(jax.jit(jax.vmap(one))(many_hparams(CHECKED_RUNS), keys))


def check(device: jax.Device, config: ppo.Config) -> dict[str, Any]:
    """How far the accelerator's result is from the CPU's."""
    apart = difference(train_on(device, config), train_on(jax.devices("cpu")[0], config))
    return {"check": apart, "ok": apart <= TOLERANCE}


def measure(job: Job, base: ppo.Config, device: jax.Device, allowed: float) -> dict[str, Any]:
    """Compiles one program and times it.

    Args:
      job: which program.
      base: what its variant changes.
      device: where it runs.
      allowed: seconds that a whole training may take; a longer one is timed by a few calls.
    """
    variant = variants()[job.variant]
    config = dataclasses.replace(base, **variant.config)
    updates = min(UPDATES, config.num_updates)
    fresh = functools.partial(start, config, variant.generator, job.num_runs)
    hparams, state = jax.device_put(fresh(), device)
    program, compile_seconds = compiled(config, variant, updates, hparams, state)

    for _ in range(DISCARDED):
        state, metrics, _ = call(program, hparams, state, 1)
    timed = []
    for _ in range(TIMED):
        state, metrics, seconds = call(program, hparams, state, 1)
        timed.append(seconds / updates)
    per_update, num_timed = statistics.median(timed), TIMED * updates
    if per_update * config.num_updates < allowed:
        num_timed = config.num_updates // updates * updates
        state, metrics, seconds = call(program, hparams, jax.device_put(fresh(), device)[1], num_timed // updates)
        per_update = seconds / num_timed

    one = jax.eval_shape(lambda: jax.tree.map(lambda leaf: leaf[0], state))
    flops = matrix_flops(jax.make_jaxpr(functools.partial(ppo.update, config, ppo.HParams()))(one).jaxpr)
    return {
        "num_updates": config.num_updates,
        "updates_timed": num_timed,
        "seconds_per_update": per_update,
        "calls": timed,
        "runs_per_minute": 60 * job.num_runs / (per_update * config.num_updates),
        "steps_per_second": job.num_runs * config.batch_size / per_update,
        "flops_per_second": job.num_runs * flops / per_update,
        "compile_seconds": compile_seconds,
        "peak_bytes": program.memory_analysis().peak_memory_in_bytes,
        "episode_return": float(jnp.nanmean(metrics.episode_return[:, -1])),
        "ok": bool(metrics.all_finite.all()),
    }


def call(program: Any, hparams: ppo.HParams, state: ppo.TrainState, times: int) -> tuple[Any, ppo.Metrics, float]:
    """The state after so many calls, the metrics of the last, and the seconds of all."""
    started = time.perf_counter()
    for _ in range(times):
        state, metrics = program(hparams, state)
    jax.block_until_ready((state, metrics))
    return state, metrics, time.perf_counter() - started


def start(config: ppo.Config, generator: str, num_runs: int) -> tuple[ppo.HParams, ppo.TrainState]:
    """Hyperparameters and states of many runs, made on the CPU, which compiles them faster than an accelerator."""
    with jax.default_device(jax.devices("cpu")[0]):
        keys = jax.random.split(jax.random.key(0, impl=generator), num_runs)
        hparams = many_hparams(num_runs)
        return hparams, many_states(config, hparams, keys)


@functools.partial(jax.jit, static_argnums=0)
def many_states(config: ppo.Config, hparams: ppo.HParams, keys: jax.Array) -> ppo.TrainState:
    """Of runs with each its own hyperparameters and key."""
    return jax.vmap(functools.partial(ppo.init, config))(hparams, keys)


def compiled(
    config: ppo.Config, variant: Variant, updates: int, hparams: ppo.HParams, state: ppo.TrainState
) -> tuple[Any, float]:
    """The program of so many updates of all runs, which takes over the buffers of the state; and its seconds."""

    def one(hparams: ppo.HParams, state: ppo.TrainState) -> tuple[ppo.TrainState, ppo.Metrics]:
        return ppo.run(config, hparams, state, updates)

    started = time.perf_counter()
    with jax.default_matmul_precision(variant.precision):
        lowered = jax.jit(jax.vmap(one), donate_argnums=1).lower(hparams, state)
    return lowered.compile(compiler_options=dict(variant.options)), time.perf_counter() - started


def many_hparams(num_runs: int) -> ppo.HParams:
    """The default ones, of each run its own."""
    return ppo.HParams(*(jnp.full(num_runs, value, jnp.float32) for value in ppo.HParams()))


def records(base: ppo.Config, device: jax.Device, todo: list[Job], limit: float) -> Iterator[dict[str, Any]]:
    """The results, as they come: of the check, and of every job. A failure is a result too."""
    deadline = time.perf_counter() + limit
    yield attempt(lambda: check(device, base))
    longest = 0.0
    for job in todo:
        started = time.perf_counter()
        left = deadline - started
        if left < 1.5 * longest:
            yield job._asdict() | {"error": "no time left"}
            continue
        allowed = min(WHOLE, left / 2) if job.variant == "default" else 0.0
        result = attempt(functools.partial(measure, job, base, device, allowed))
        spent = time.perf_counter() - started
        longest = max(longest, result.get("compile_seconds", spent))
        yield job._asdict() | result


def attempt(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What it returns, or the error that stopped it."""
    try:
        return function()
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200].replace("|", "/")}


def row(record: dict[str, Any]) -> str:
    """A line of the table."""
    head = f"| {record['variant']} | {record['num_runs']:,} | "
    if "error" in record:
        return head + f"{record['error']} | | | | | | |"
    timed, whole = record["updates_timed"], record["num_updates"]
    final = f"{record['episode_return']:.0f}" if timed == whole else ""
    return head + (
        f"{record['runs_per_minute']:,.0f} | {record['steps_per_second'] / 1e6:.2f} "
        f"| {record['flops_per_second'] / 1e12:.2f} | {record['compile_seconds']:.1f} "
        f"| {record['peak_bytes'] / 2**30:.2f} | {'all' if timed == whole else timed} of {whole} "
        f"| {final if record['ok'] else 'not finite'} |"
    )


def page(where: str, config: ppo.Config, found: list[dict[str, Any]]) -> str:
    """The results so far, as the file that is kept."""
    checked, *measured = found
    agrees = checked.get("error") or (
        f"{CHECKED_RUNS} runs x {CHECKED_UPDATES} updates, matrix products in float32, are {checked['check']:.1e} from "
        f"the CPU's (allowed {TOLERANCE:g}): {'they agree' if checked['ok'] else 'THEY DIFFER'}."
    )
    return "\n".join(
        [
            "# On an accelerator",
            "",
            f"{where}. `python benchmarks/gpu.py`; runs of {config.total_timesteps:,} steps of {config.env}.",
            "",
            agrees,
            "",
            "FLOP/s are those of the matrix products. Compiling is apart. Peak memory is the program's, state and",
            "results included. Where not all updates are timed the figures are medians of a few calls. Return is",
            "that of the last update of a whole training, the mean over the runs.",
            "",
            "| program | runs | runs/minute | million steps/s | TFLOP/s | compile s | GiB | updates timed | return |",
            "|---|---|---|---|---|---|---|---|---|",
            *map(row, measured),
            "",
        ]
    )


def benchmark(base: ppo.Config, device: jax.Device, todo: list[Job], limit: float, out: Path) -> int:
    """Measures, and keeps every result at once; returns the exit code: 1 if the CPU or the default program says no."""
    where = f"jax {jax.__version__}, Python {platform.python_version()}, {device.device_kind}"
    found: list[dict[str, Any]] = []
    for record in records(base, device, todo, limit):
        found.append(record)
        with out.with_suffix(".jsonl").open("a") as file:
            file.write(json.dumps({"where": where, "time": time.time()} | record) + "\n")
        out.write_text(page(where, base, found))
        print(record, file=sys.stderr, flush=True)
    print(out.read_text())
    needed = [record for record in found if record.get("variant", "default") == "default"]
    return 0 if all(record.get("ok", record.get("error") == "no time left") for record in needed) else 1


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code; 2 where there is nothing to measure on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 64, 512, 2048, 4096])
    parser.add_argument("--variants", nargs="+", default=list(variants()), choices=list(variants()))
    parser.add_argument("--steps", type=int, default=500_000, help="environment steps of a run")
    parser.add_argument("--limit", type=float, default=540, help="seconds for everything")
    parser.add_argument("--platform", choices=["cpu"], help="measure on the CPU after all")
    parser.add_argument("--out", type=Path, default=TABLE)
    options = parser.parse_args(arguments)
    device = jax.devices()[0]
    if device.platform == "cpu" and options.platform != "cpu":
        print("gpu: JAX finds no accelerator here; --platform cpu tries the script without one", file=sys.stderr)
        return 2
    if options.platform:
        device = jax.devices(options.platform)[0]
    todo = jobs(options.runs, options.variants)
    return benchmark(ppo.Config(total_timesteps=options.steps), device, todo, options.limit, options.out)


def _has_generator(name: str) -> bool:
    try:
        jax.random.key(0, impl=name)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
