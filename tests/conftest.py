"""Starts JAX on two CPU devices with the fastest compilation, and registers the test environments."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()

import jax

jax.config.update("jax_num_cpu_devices", 2)

from tests import environments  # noqa: E402 (gymnax starts JAX)

environments.register()
