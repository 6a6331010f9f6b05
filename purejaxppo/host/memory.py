"""How much memory there is to train in."""

from pathlib import Path

import jax

from purejaxppo.config import Config
from purejaxppo.host.programs import compile_group
from purejaxppo.plan import Plan
from purejaxppo.sweep import fit, num_bytes_of_metrics

# Left to what else runs on the machine, and to what a compiler's estimate misses.
SHARE = 0.8

# (limit, used) of the process's control group, version 2 and version 1.
CONTROL_GROUPS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def free() -> int:
    """Bytes of main memory that this process may still take: what the machine has free, or its control group allows."""
    lines = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    known = [int(lines["MemAvailable"].split()[0]) * 1024] if "MemAvailable" in lines else []
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        numbers = [_read(f"/sys/fs/cgroup/{name}").strip() for name in (limit, used)]
        if all(number.isdigit() for number in numbers):
            known.append(int(numbers[0]) - int(numbers[1]))
    return max(0, min(known, default=1 << 62))


def of_device() -> int:
    """Bytes that a program may take of each local device."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return int(SHARE * free() / len(jax.local_devices()))
    stats = device.memory_stats() or {}
    return int(SHARE * stats.get("bytes_limit", 1 << 62))


def check_results(plan: Plan) -> None:
    """Raises ValueError when the metrics of all runs do not fit in memory."""
    need, there = num_bytes_of_metrics(plan), free()
    if need > SHARE * there:
        raise ValueError(
            f"num_seeds = {plan.num_seeds}: the metrics of {plan.num_runs:,} runs take {text(need)}, "
            f"and {text(there)} are free: split the sweep, or choose fewer seeds or longer rollouts"
        )


def fit_plan(plan: Plan, chunk_size: int | None) -> Plan:
    """The plan with chunks that fit in the devices' memory.

    Raises:
      ValueError: when a `chunk_size` that was asked for does not, or not even two runs do.
    """
    there = of_device()
    fitted = fit(plan, there, compile_group)
    for before, after in zip(plan.groups, fitted.groups, strict=True):
        if chunk_size is not None and after != before:
            need = compile_group(before.config, before.shape).num_bytes
            raise ValueError(
                f"chunk_size = {chunk_size}: needs {text(need)} of each device, of which {text(there)} are free; "
                f"{after.chunk_size} fits"
            )
        if after.shape.width == 1 and after != before and compile_group(after.config, after.shape).num_bytes > there:
            size = "num_envs" if isinstance(after.config, Config) else "batch_size"
            raise ValueError(
                f"config.{size} = {getattr(after.config, size)}: two runs of this config need "
                f"{text(compile_group(after.config, after.shape).num_bytes)} of a device with {text(there)} free"
            )
    return fitted


def text(num_bytes: float) -> str:
    """A number of bytes as a person reads it."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:,.{0 if unit == 'bytes' else 1}f} {unit}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
