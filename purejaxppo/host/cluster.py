"""Chunks of a sweep as tasks of Ray, on this machine or on a cluster."""

import contextlib
import importlib
import logging
import os
import socket
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from purejaxppo.host.programs import compile_group
from purejaxppo.plan import Chunk, Plan
from purejaxppo.sweep import train_chunk

REACH_SECONDS = 5  # to wait for a cluster
RETRIES = 5  # of a task whose worker died


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Ray, while it is connected to the cluster at an address, or to one started on this machine.

    Args:
      address: "host:port", "ray://host:port" or "auto"; None starts Ray here.

    Raises:
      ValueError: when Ray is not installed or no cluster answers there, within seconds.
    """
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", str(REACH_SECONDS))  # one a second, 20 without
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise ValueError("executor = 'ray': Ray is not installed; pip install 'purejaxppo[ray]'") from None
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        options["include_dashboard"] = False
    else:
        _check_address(address)
        options["address"] = address
    try:
        with warnings.catch_warnings():  # Ray starts its processes by fork and exec at once, which threads survive
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
            ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise ValueError(f"ray_address = {address!r}: {error}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def on_ray(ray: Any, plan: Plan, indices: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """Trains chunks as Ray tasks, in whatever order they finish; a task whose worker dies is begun again elsewhere.

    Each task gets as many devices as the plan gives a chunk, and on CPUs this process's XLA_FLAGS, wherever it runs, so
    its numbers are those of this machine. On CPUs it asks Ray for half as many cores as it has devices: two tasks then
    share a machine, and one computes while the other compiles or waits.
    """
    on_cpu = jax.default_backend() == "cpu"
    pending = {}
    for index in indices:
        chunk = plan.chunk(index)
        devices = chunk.shape.num_devices
        needs = {"num_cpus": max(1, devices // 2)} if on_cpu else {"num_cpus": 1, "num_gpus": devices}
        task = ray.remote(max_retries=RETRIES, **needs)(train_remotely)
        pending[task.remote(chunk, on_cpu, os.environ.get("XLA_FLAGS", ""))] = index
    while pending:
        (done,), _ = ray.wait(list(pending), num_returns=1)
        yield pending.pop(done), ray.get(done)


def train_remotely(chunk: Chunk, on_cpu: bool, xla_flags: str) -> Any:
    """What a worker does."""
    if on_cpu:
        os.environ["XLA_FLAGS"] = xla_flags
        with contextlib.suppress(RuntimeError):  # JAX has started: this worker has trained a chunk before
            jax.config.update("jax_num_cpu_devices", chunk.shape.num_devices)
    _, metrics = train_chunk(compile_group(chunk.config, chunk.shape), chunk)
    return metrics


def _check_address(address: str) -> None:
    """Refuses an address of the wrong form, or at which nothing listens."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"ray_address = {address!r}: must be host:port, ray://host:port or auto")
    try:
        socket.create_connection((host, int(port)), timeout=REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"ray_address = {address!r}: no cluster answers there ({error})") from None
