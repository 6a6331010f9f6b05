"""The script that measures an accelerator, on the CPU: what it does around the measurement."""

import json
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import tiny

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import gpu
from flops import matrix_flops


def test_matrix_flops_by_hand():
    """(3 x 5) @ (5 x 7) takes 2 * 3 * 5 * 7 = 210; seven of a scan of a batch of 4; both branches; one iteration."""
    x, y = jnp.ones((3, 5)), jnp.ones((5, 7))

    def flops(function, *args):
        return matrix_flops(jax.make_jaxpr(function)(*args).jaxpr)

    def square(x):
        return x @ x

    assert flops(jnp.dot, x, y) == 210
    assert flops(jnp.add, x, x) == 0
    assert flops(jax.vmap(jax.jit(jnp.dot), (None, 0)), x, jnp.ones((4, 5, 7))) == 4 * 210
    assert flops(lambda x: jax.lax.scan(lambda x, _: (square(x), None), x, length=7), jnp.ones((4, 4))) == 7 * 128
    assert flops(lambda x: jax.lax.cond(x.sum() > 0, square, lambda x: square(square(x)), x), jnp.ones((4, 4))) == 384
    assert flops(lambda x: jax.lax.while_loop(lambda x: x.sum() > 0, square, x), jnp.ones((4, 4))) == 128
    # The gradient by x alone: the product, and that of what comes back with y.
    assert flops(jax.grad(lambda x, y: (x @ y).sum()), x, y) == 420


@pytest.mark.parametrize(
    ("x", "y", "apart"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 5.0], [1.0, 3.0], 0.5),
        ([np.nan, 1.0], [np.nan, 1.0], 0.0),
        ([np.nan, 1.0], [0.0, 1.0], math.inf),
        ([False, True], [True, True], 0.5),
        ([], [], 0.0),
    ],
)
def test_difference(x, y, apart):
    assert gpu.difference({"a": np.array(x), "b": 0}, {"a": np.array(y), "b": 0}) == apart


def test_every_variant_is_one_of_this_package_and_of_jax():
    assert next(iter(gpu.variants())) == "default"
    for variant in gpu.variants().values():
        tiny(**variant.config)
        jax.random.key(0, impl=variant.generator)
        with jax.default_matmul_precision(variant.precision):
            pass


def test_the_default_program_comes_first_and_the_largest_before_all():
    assert gpu.jobs([1, 64, 8], ["bfloat16", "default", "x"]) == [
        *(gpu.Job("default", number) for number in (64, 8, 1)),
        gpu.Job("bfloat16", 64),
        gpu.Job("x", 64),
    ]


@pytest.mark.slow
def test_measuring_on_the_cpu(tmp_path, monkeypatch):
    """A program that trains to its end, one that is not compiled, and the files that they leave."""
    broken = gpu.Variant(options={"xla_there_is_no_such_option": "1"})
    monkeypatch.setattr(gpu, "variants", lambda: {"default": gpu.Variant(), "broken": broken})
    monkeypatch.setattr(gpu, "UPDATES", 2)
    monkeypatch.setattr(gpu, "check", lambda device, config: {"check": 0.0, "ok": True})
    config = tiny(total_timesteps=4 * 16)
    todo = gpu.jobs([2], ["default", "broken"])
    assert gpu.benchmark(config, jax.devices("cpu")[0], todo, limit=1000, out=tmp_path / "gpu.md") == 0

    checked, measured, failed = map(json.loads, (tmp_path / "gpu.jsonl").read_text().splitlines())
    assert checked["check"] == 0
    assert (measured["variant"], measured["num_runs"]) == ("default", 2)
    assert measured["updates_timed"] == 4
    assert measured["steps_per_second"] == pytest.approx(2 * 16 / measured["seconds_per_update"])
    assert measured["runs_per_minute"] == pytest.approx(60 * measured["steps_per_second"] / (4 * 16))
    assert "No such compile option" in failed["error"]
    page = (tmp_path / "gpu.md").read_text()
    assert "they agree" in page
    assert page.count("| all of 4 |") == 1
    assert page.count("No such compile option") == 1


@pytest.mark.slow
def test_the_check_sees_another_program():
    cpu = jax.devices("cpu")[0]
    assert gpu.check(cpu, tiny()) == {"check": 0, "ok": True}
    one, other = gpu.train_on(cpu, tiny()), gpu.train_on(cpu, tiny(normalize_advantages=False))
    assert gpu.difference(one[0], other[0]) > gpu.TOLERANCE


def test_what_the_limit_leaves_no_time_for_is_named(monkeypatch):
    monkeypatch.setattr(gpu, "check", lambda device, config: {"check": 0.0, "ok": True})
    monkeypatch.setattr(gpu, "measure", lambda job, base, device, allowed: {"compile_seconds": 100.0, "ok": True})
    found = list(gpu.records(tiny(), None, [gpu.Job("default", 4), gpu.Job("default", 2)], limit=120))
    assert [record.get("error") for record in found] == [None, None, "no time left"]


def test_a_difference_from_the_cpu_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "check", lambda device, config: {"check": 0.25, "ok": False})
    assert gpu.benchmark(tiny(), jax.devices("cpu")[0], [], limit=100, out=tmp_path / "gpu.md") == 1
    assert "THEY DIFFER" in (tmp_path / "gpu.md").read_text()


def test_without_an_accelerator_it_says_so_in_one_line(capsys):
    assert gpu.main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1
