"""Many runs over all local devices: how they are laid out, and the program that every device runs on its share."""

import os
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

RUNS = PartitionSpec("runs")

# XLA compiles a loop on a CPU into one kernel if its body reads and writes less than this many bytes, by default 1024.
# It only reads this from the environment. A rollout's step of a few runs takes 0.2 MB, an optimiser step of one 3 MB.
KERNEL_LOOPS = "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=1048576"

# More runs side by side make an accelerator no faster; one after another they need less memory.
ACCELERATOR_WIDTH = 4096


def use_all_cores(at_least: int = 1, at_most: int | None = None) -> None:
    """Gives XLA one CPU device per core, for `sweep` to spread its runs over. Changes nothing on an accelerator.

    Call it before anything else uses JAX. It also lets XLA make one kernel of a loop with little in it (`XLA_FLAGS`,
    unless they set `xla_backend_extra_options` already).

    Args:
      at_least: devices, however few the cores: what runs need that were begun on a machine with more.
      at_most: devices, however many the cores. With 1, XLA also computes in one thread: what a single run of small
        networks is fastest in, since threads take longer to hand its kernels on than to compute them.

    Raises:
      RuntimeError: when JAX has already started.
      ValueError: if `at_most` is below `at_least`, or below 1.
    """
    if at_most is not None and at_most < max(at_least, 1):
        raise ValueError(f"at_most = {at_most}: must be at least {max(at_least, 1)}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    devices = max(at_least, min(cores or 1, at_most or cores or 1))
    jax.config.update("jax_num_cpu_devices", devices)
    if at_most == 1:
        os.environ.setdefault("PJRT_NPROC", "1")  # threads of XLA's client
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_backend_extra_options" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {KERNEL_LOOPS}".strip()


def has_kernel_loops() -> bool:
    """Whether XLA makes one kernel of a loop with little in it, which then costs little a turn."""
    return KERNEL_LOOPS in os.environ.get("XLA_FLAGS", "") and not on_accelerator()


def on_accelerator() -> bool:
    """Whether JAX computes on something else than a CPU by default."""
    return jax.default_backend() != "cpu"


def mesh_of(num_runs: int) -> Mesh:
    """The local devices, no more of them than runs, on one axis."""
    return Mesh(jax.local_devices()[:num_runs], ("runs",))


def layout(num_runs: int, mesh: Mesh, cpu_width: int) -> tuple[int, int]:
    """(runs that a device takes at once, the number of runs padded so that all blocks of all devices are full).

    On a CPU a device takes `cpu_width` runs at a time, whose working set should stay in its cache; an accelerator
    takes thousands.
    """
    share = -(-num_runs // mesh.size)
    blocks = -(-share // (cpu_width if _on_cpu(mesh) else ACCELERATOR_WIDTH))
    width = -(-share // blocks)
    return width, width * blocks * mesh.size


def shard(
    mesh: Mesh,
    width: int,
    function: Callable[..., Any],
    num_shared: int = 0,
    num_by_run: int = 1,
    donate: tuple[int, ...] = (),
) -> Any:
    """`function` for one run, jitted for many: each device its share, in blocks of `width` runs.

    Args:
      mesh: the devices.
      width: runs in a block; divides each device's share.
      function: (what all runs share, then what is each run's own) -> any arrays.
      num_shared: arguments that all runs share.
      num_by_run: arguments with a leading run axis, as the results have.
      donate: arguments whose buffers the results may take.
    """

    def share(*args: Any) -> Any:
        shared, own = args[:num_shared], args[num_shared:]
        return jax.lax.map(lambda own: function(*shared, *own), own, batch_size=width)

    specs = (PartitionSpec(),) * num_shared + (RUNS,) * num_by_run
    return jax.jit(
        # The scans of a run start from constants, which vary over no device: check_vma would refuse their carries.
        jax.shard_map(share, mesh=mesh, in_specs=specs, out_specs=RUNS, check_vma=False),
        in_shardings=tuple(NamedSharding(mesh, spec) for spec in specs),
        out_shardings=NamedSharding(mesh, RUNS),
        donate_argnums=donate,
        compiler_options=compiler_options(mesh),
    )


def compiler_options(mesh: Mesh) -> dict[str, str]:
    """On a CPU LLVM's first level halves the compile time of these programs, and costs the networks no speed."""
    return {"xla_backend_optimization_level": "1"} if _on_cpu(mesh) else {}


def _on_cpu(mesh: Mesh) -> bool:
    return bool(mesh.devices.flat[0].platform == "cpu")
