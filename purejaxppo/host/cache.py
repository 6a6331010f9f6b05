"""Compiled programs, kept between processes."""

import os
from pathlib import Path

import jax

MAX_BYTES = 2**31  # of all programs together; those that were used least recently go first


def use() -> None:
    """Keeps compiled programs in the user's cache directory: the second start of a command need not wait for XLA.

    A program is found again only by the same versions on the same kind of machine, and computes the same bits. A
    directory that JAX was told to use already stays in use; one that cannot be written to is not used.

    Call it before anything is compiled.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "purejaxppo"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(directory, os.W_OK | os.X_OK):
        jax.config.update("jax_compilation_cache_dir", str(directory))
        jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)  # many small programs add up
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
