"""Programs of training, kept between processes."""

import os
import pickle

import jax
import pytest

from purejaxppo import HParams, segments
from purejaxppo.host import programs
from purejaxppo.plan import make_plan
from tests.helpers import tiny


@pytest.fixture
def directory(tmp_path):
    """A cache directory in use."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / "programs"
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def compilations(monkeypatch):
    """A list that grows by one with each compilation."""
    compile_programs, calls = segments.compile_programs, []

    def counted(*arguments):
        calls.append(arguments)
        return compile_programs(*arguments)

    monkeypatch.setattr(segments, "compile_programs", counted)
    return calls


def chunk_of(num_seeds=1, **changes):
    return make_plan(tiny(**changes), HParams(), num_seeds, 0, chunk_size=num_seeds).chunk(0)


def results_of(chunk, num_episodes=3):
    """Metrics and state after two updates, and evaluations of it: bytes; and the memory that is needed."""
    compiled = programs.compiled(chunk.config, chunk.shape, num_episodes)
    hparams, state = segments.begin(chunk, compiled)
    state, metrics = segments.advance(chunk, compiled, hparams, state, 2)
    episodes = segments.evaluate_runs(chunk, compiled, state, 2) if num_episodes else ()
    leaves = jax.tree.leaves((metrics, episodes, segments.take(chunk, state)))
    return [leaf.tobytes() for leaf in leaves], compiled.num_bytes


@pytest.mark.slow
def test_kept_programs_compute_the_same_bits_and_nothing_is_compiled_again(directory, compilations):
    chunk = chunk_of()
    first = results_of(chunk)
    assert results_of(chunk) == first
    assert len(compilations) == 1

    (path,) = directory.iterdir()
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert results_of(chunk) == first
    assert len(compilations) == 2, "a damaged file is compiled again"
    assert results_of(chunk) == first
    assert len(compilations) == 2, "and mended"


def test_other_settings_shapes_and_code_have_other_programs(directory, monkeypatch):
    chunk, other = chunk_of(), chunk_of(hidden_sizes=(9,))
    digests = {
        programs._digest(chunk.config, chunk.shape, 0),
        programs._digest(chunk.config, chunk.shape, 5),
        programs._digest(chunk.config, chunk.shape._replace(num_blocks=3), 0),
        programs._digest(other.config, chunk.shape, 0),
    }
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    digests.add(programs._digest(chunk.config, chunk.shape, 0))
    monkeypatch.setattr(programs.files, "versions", lambda: {"jax": "0"})
    digests.add(programs._digest(chunk.config, chunk.shape, 0))
    with jax.default_matmul_precision("highest"):
        digests.add(programs._digest(chunk.config, chunk.shape, 0))
    assert len(digests) == 7


@pytest.mark.parametrize("content", [b"", b"x", pickle.dumps(3), pickle.dumps(([(b"", 0, 0)], 5))])
def test_a_file_of_something_else_is_as_none(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    assert programs._load(tmp_path / "file", chunk_of().shape) is None
    assert programs._load(tmp_path / "missing", chunk_of().shape) is None


@pytest.mark.slow
def test_a_program_that_jaxs_own_cache_has_is_kept_too(directory, compilations):
    chunk = chunk_of()
    segments.compile_programs(chunk.config, chunk.shape)
    first = results_of(chunk, num_episodes=0)
    assert results_of(chunk, num_episodes=0) == first
    assert len(compilations) == 2  # that of the test, and the first


def test_a_place_that_cannot_be_written_to_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    one = jax.jit(lambda x: x + 1).lower(1.0).compile()
    programs._save(tmp_path / "file" / "below.programs", segments.Programs(one, one, None, 5))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_without_a_cache_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(segments, "compile_programs", lambda *arguments: arguments)
    assert jax.config.values["jax_compilation_cache_dir"] is None
    assert programs.compiled("config", "shape") == ("config", "shape", 0)
    assert not list(tmp_path.iterdir())


def test_programs_of_an_environment_of_ones_own_are_not_kept(directory, monkeypatch):
    """Its code is not part of what they are found by."""
    monkeypatch.setattr(segments, "compile_programs", lambda *arguments: arguments)
    chunk = chunk_of(env="ConstantReward-test")
    assert programs.compiled(chunk.config, chunk.shape) == (chunk.config, chunk.shape, 0)
    assert not directory.exists()


def test_those_used_least_recently_go(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "MAX_FILES", 2)
    for age, name in enumerate(("new", "middle", "old")):
        (tmp_path / f"{name}.programs").touch()
        os.utime(tmp_path / f"{name}.programs", (1000 - age, 1000 - age))
    programs._forget(tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} == {"new", "middle"}
