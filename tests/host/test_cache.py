"""Compiled programs between processes."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from purejaxppo.host import cache

SMALL = "num_seeds = 2\n[config]\ntotal_timesteps = 1024\nnum_steps = 64\nhidden_sizes = [8]\n"
USE = cache.use  # the tests' process does not


@pytest.fixture
def settings():
    """The names of JAX's settings are restored."""
    names = (
        "jax_compilation_cache_dir",
        "jax_compilation_cache_max_size",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: jax.config.values[name] for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_it_is_in_the_users_cache_directory(tmp_path, monkeypatch, settings):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    USE()
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "xdg" / "purejaxppo")


def test_without_that_variable_it_is_in_the_home_directory(tmp_path, monkeypatch, settings):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    USE()
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / ".cache" / "purejaxppo")


def test_what_jax_was_told_stays(tmp_path, settings):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    USE()
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path)


def test_a_directory_that_cannot_be_made_is_no_error(tmp_path, monkeypatch, settings):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    USE()
    assert jax.config.values["jax_compilation_cache_dir"] is None


@pytest.mark.slow
def test_the_second_start_compiles_nothing_and_computes_the_same_bits(tmp_path):
    (tmp_path / "small.toml").write_text(SMALL)
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["XDG_CACHE_HOME"] = str(tmp_path / "xdg")
    results, kept = [], []
    for name, *flags in (("off", "--no-compilation-cache"), ("first",), ("second",)):
        command = [sys.executable, "-m", "purejaxppo.host.cli", "train", "small.toml", "--out", name, *flags]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        lines = [line for line in done.stderr.splitlines() if "seeds of CartPole" not in line and line.strip()]
        assert lines == [], "nothing but the progress bar belongs on standard error"
        with np.load(tmp_path / name / "metrics.npz") as arrays:
            results.append({metric: array.tobytes() for metric, array in arrays.items()})
        kept.append({path.name for path in Path(tmp_path, "xdg").rglob("*.programs")})
    assert results[0] == results[1] == results[2]
    assert kept[0] == set()
    assert len(kept[1]) == 1
    assert kept[2] == kept[1]
