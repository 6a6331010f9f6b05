"""Chunks of a sweep as tasks of Ray, on this machine or on a cluster."""

import contextlib
import importlib
import logging
import socket
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from purejaxppo.plan import Chunk, Plan
from purejaxppo.sweep import train_chunk
from purejaxppo.types import Metrics

REACH_SECONDS = 5.0
RETRIES = 5  # of a task whose worker died


def on_ray(plan: Plan, indices: Sequence[int], address: str | None) -> Iterator[tuple[int, Metrics]]:
    """Trains chunks as Ray tasks, in whatever order they finish; a task whose worker dies is begun again elsewhere.

    Each task gets as many devices as the plan gives a chunk, wherever it runs, so its numbers are those of this
    machine. On CPUs it asks Ray for half as many cores as it has devices: two tasks then share a machine, and one
    computes while the other compiles or waits.

    Args:
      plan: of the sweep.
      indices: of the chunks to train.
      address: of the cluster, "host:port" or "ray://host:port"; None starts Ray on this machine.

    Raises:
      ValueError: as `check`.
    """
    ray = _start(check(address), address)
    try:
        on_cpu = jax.default_backend() == "cpu"
        pending = {}
        for index in indices:
            chunk = plan.chunk(index)
            devices = chunk.shape.num_devices
            needs = {"num_cpus": max(1, devices // 2)} if on_cpu else {"num_cpus": 1, "num_gpus": devices}
            task = ray.remote(max_retries=RETRIES, **needs)(train_remotely)
            pending[task.remote(chunk, on_cpu)] = index
        while pending:
            (done,), _ = ray.wait(list(pending), num_returns=1)
            yield pending.pop(done), ray.get(done)
    finally:
        ray.shutdown()


def train_remotely(chunk: Chunk, on_cpu: bool) -> Metrics:
    """What a worker does."""
    if on_cpu:
        with contextlib.suppress(RuntimeError):  # JAX has started: this worker has trained a chunk before
            jax.config.update("jax_num_cpu_devices", chunk.shape.num_devices)
    _, metrics = train_chunk(chunk)
    return metrics


def check(address: str | None) -> Any:
    """Ray, if it is installed and something answers at the address.

    Raises:
      ValueError: otherwise, within seconds.
    """
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise ValueError("executor = 'ray': Ray is not installed; pip install 'purejaxppo[ray]'") from None
    if address in (None, "auto"):
        return ray
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"ray_address = {address!r}: must be host:port, ray://host:port or auto")
    try:
        socket.create_connection((host, int(port)), timeout=REACH_SECONDS).close()  # Ray would try for minutes
    except (OSError, OverflowError) as error:
        raise ValueError(f"ray_address = {address!r}: no cluster answers there ({error})") from None
    return ray


def _start(ray: Any, address: str | None) -> Any:
    """Ray, connected."""
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        with warnings.catch_warnings():  # Ray starts its processes by fork and exec at once, which threads survive
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
            ray.init(include_dashboard=False, **quiet)
        return ray
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise ValueError(f"ray_address = {address!r}: {error}") from None
    return ray
