"""The programs of training, kept between processes as the machine runs them.

JAX's own cache (`cache`) spares the second start of a command the compiler; tracing and lowering are left, longer than
everything else until the first update. What is kept here needs neither.
"""

import contextlib
import functools
import hashlib
import os
import pickle
import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from purejaxppo import kinds, segments
from purejaxppo.host import files
from purejaxppo.plan import Shape
from purejaxppo.segments import Programs

if TYPE_CHECKING:
    from purejaxppo.kinds import AnyConfig

MAX_FILES = 100  # of about a megabyte; those that were used least recently go first


def compiled(config: "AnyConfig", shape: Shape, num_episodes: int = 0) -> Programs:
    """`segments.compile_programs`, or what it once returned for the same arguments, code, versions and machine.

    Kept where `cache` keeps the rest, if it is in use; a file that cannot be read or written is as none. Programs of
    an environment that a user registered, or of a task of one's own, are not kept: its code may be another next time.
    """
    directory = _directory()
    if directory is None or not kinds.of(config).is_known(config):
        return segments.compile_programs(config, shape, num_episodes)
    path = directory / f"{_digest(config, shape, num_episodes)}.programs"
    programs = _load(path, shape)
    if programs is None:
        with _jax_cache_aside():
            programs = segments.compile_programs(config, shape, num_episodes)
        _save(path, programs)
    return programs


@functools.lru_cache(maxsize=8)
def compile_group(config: "AnyConfig", shape: Shape) -> Programs:
    """The programs of a group of a sweep, kept in this process too: for its next chunk, or a sweep of its shape."""
    return compiled(config, shape)


def _directory() -> Path | None:
    """Of the files; None if JAX's cache is not in use, or not on a disk."""
    root = jax.config.values["jax_compilation_cache_dir"]
    return Path(root) / "programs" if root is not None and Path(root).is_dir() else None


def _digest(config: "AnyConfig", shape: Shape, num_episodes: int) -> str:
    """Of everything that the programs depend on."""
    settings = {name: value for name, value in jax.config.values.items() if "cache" not in name}
    root = Path(__file__).parents[1]  # the package
    digest = hashlib.sha256()
    for part in (config, shape, num_episodes, sorted(settings.items()), os.environ.get("XLA_FLAGS"), *_surroundings()):
        digest.update(repr(part).encode() + b"\0")
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _surroundings() -> tuple[Any, ...]:
    """Versions, devices, and what this processor can do: a home directory may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    abilities = {line for line in lines if line.startswith(("flags", "Features"))}
    devices = jax.local_devices()
    return files.versions(), files.machine(), platform.machine(), sorted(abilities), [str(one) for one in devices]


def _load(path: Path, shape: Shape) -> Programs | None:
    def load(parts: Any) -> Any:
        if parts is None:
            return None
        payload, in_tree, out_tree = parts
        return serialize_executable.deserialize_and_load(payload, in_tree, out_tree, execution_devices=devices)

    devices = list(shape.mesh.devices.flat)
    try:
        kept, num_bytes = pickle.loads(path.read_bytes())
        os.utime(path)
        with ThreadPoolExecutor() as pool:
            start, segment, evaluate = pool.map(load, kept)
        return Programs(start, segment, evaluate, num_bytes)
    except Exception:  # whatever is wrong with the file, compiling makes it good
        return None


def _save(path: Path, programs: Programs) -> None:
    try:
        *compiled, num_bytes = programs
        kept = [one and serialize_executable.serialize(one) for one in compiled]
        path.parent.mkdir(exist_ok=True)
        files.replace(path, pickle.dumps((kept, num_bytes)))
        _forget(path.parent)
    except (OSError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
        return  # a full disk, or a program that holds what cannot be kept: then it is compiled each time


def _forget(directory: Path) -> None:
    """Leaves `MAX_FILES`."""
    by_use = sorted(directory.glob("*.programs"), key=lambda path: path.stat().st_mtime)
    for path in by_use[:-MAX_FILES]:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _jax_cache_aside() -> Iterator[None]:
    """Without JAX's cache: jaxlib cannot serialise once more what came out of it, and the copy there is not needed."""
    directory = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", directory)
        compilation_cache.reset_cache()
