"""The accounting of benchmarks/hlo_cost.py on programs whose counts are known by hand, and the table of gpu_cost.py."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import purejaxppo as ppo
from tests.helpers import tiny

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import gpu_cost  # noqa: E402
import hlo_cost  # noqa: E402

needs_compiler = pytest.mark.skipif(gpu_cost.missing() is not None, reason=str(gpu_cost.missing()))


def program(entry: str, others: str = "") -> hlo_cost.Module:
    """A program of hand-written instructions."""
    return hlo_cost.parse(f"HloModule m\n\n{others}\nENTRY %main (x: f32[8]) -> f32[8] {{\n{entry}\n}}\n")


def counts(module: hlo_cost.Module) -> list[tuple[str, int, int]]:
    """(name, times, bytes) of its kernels."""
    return [(kernel.name, kernel.times, kernel.num_bytes) for kernel in hlo_cost.kernels(module)]


DOUBLE = """
%fused (p0: f32[1024]) -> f32[1024] {
  %p0 = f32[1024]{0} parameter(0)
  ROOT %twice = f32[1024]{0} add(%p0, %p0)
}
"""


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[8,64]{1,0}", 2048),
        ("pred[3]", 3),
        ("bf16[5]{0:T(8)(2,1)}", 10),
        ("f32[]", 4),
        ("s64[0]", 0),
        ("s4[3]", 2),
        ("f8e4m3fn[7]", 7),
        ("c64[2]", 16),
        ("token[]", 0),
        ("((f32[2]{0}, /*index=1*/u8[3]), s32[])", 15),
    ],
)
def test_size_of(shape, size):
    assert hlo_cost.size_of(shape) == size


def test_one_fusion_reads_its_operand_once_and_writes_its_result():
    entry = "  %x = f32[1024]{0} parameter(0)\n  ROOT %k = f32[1024]{0} fusion(%x), kind=kLoop, calls=%fused"
    [kernel] = hlo_cost.kernels(program(entry, DOUBLE))
    assert (kernel.kind, kernel.times, kernel.num_bytes) == ("fusion loop", 1, 2 * 4096)
    assert kernel.seconds == hlo_cost.LAUNCH  # 8 KiB take 2 ns


def test_a_large_kernel_takes_its_bytes():
    kernel = hlo_cost.Kernel("k", "fusion loop", "", 3, int(hlo_cost.BANDWIDTH), "")
    assert hlo_cost.cost_of([kernel, kernel._replace(times=2, num_bytes=0)]) == pytest.approx(
        (5, 3 * hlo_cost.BANDWIDTH, 3 + 2 * hlo_cost.LAUNCH)
    )


def test_an_unfused_operand_used_twice_is_read_once_and_names_of_memory_cost_nothing():
    entry = """
  %x = f32[8]{0} parameter(0)
  %c = f32[] constant(2)
  %b = f32[2,4]{1,0} bitcast(%x)
  %square = f32[2,4]{1,0} multiply(%b, %b), control-predecessors={%b}
  %t = (f32[2,4]{1,0}, f32[]) tuple(%square, %c)
  ROOT %g = f32[2,4]{1,0} get-tuple-element(%t), index=0"""
    assert counts(program(entry)) == [("square", 1, 2 * 32)]


LOOP = """
%cond{n} (s: (s32[], f32[1024])) -> pred[] {{
  %s{n}c = (s32[], f32[1024]) parameter(0)
  %i{n}c = s32[] get-tuple-element(%s{n}c), index=0
  %limit{n} = s32[] constant(9)
  ROOT %less{n} = pred[] compare(%i{n}c, %limit{n}), direction=LT
}}
%body{n} (s: (s32[], f32[1024])) -> (s32[], f32[1024]) {{
  %s{n} = (s32[], f32[1024]) parameter(0)
  %y{n} = f32[1024]{{0}} get-tuple-element(%s{n}), index=1
  %i{n} = s32[] get-tuple-element(%s{n}), index=0
  {inside}
  ROOT %r{n} = (s32[], f32[1024]) tuple(%i{n}, %k{n})
}}
"""


def loop(number: int, inside: str) -> str:
    return LOOP.format(n=number, inside=inside)


def while_of(number: int, known: int | None, name: str = "") -> str:
    trips = f', backend_config={{"known_trip_count":{{"n":"{known}"}},"dynamic_variables":[]}}' if known else ""
    metadata = f', metadata={{op_name="{name}"}}' if name else ""
    return f"while(%t), condition=%cond{number}, body=%body{number}{metadata}{trips}"


ENTRY = "  %x = (s32[], f32[1024]) parameter(0)\n  %t = (s32[], f32[1024]) tuple(%x)\n  ROOT %w = (s32[], f32[1024]) "
NEGATE = "%k0 = f32[1024]{0} negate(%y0)"


def test_a_loop_multiplies_by_its_trips_and_its_condition_is_never_run():
    module = program(ENTRY + while_of(0, 128), loop(0, NEGATE))
    assert counts(module) == [("k0", 128, 8192)]
    assert hlo_cost.waiting_loops(module) == []


def test_nested_loops_multiply():
    inner = f"%t = (s32[], f32[1024]) tuple(%i1, %y1)\n  %k1 = (s32[], f32[1024]) {while_of(0, 4)}"
    module = program(ENTRY + while_of(1, 3), loop(0, NEGATE) + loop(1, inner))
    assert counts(module) == [("k0", 12, 8192)]


def test_a_loop_of_unknown_trips_waits_and_counts_once_with_its_condition():
    module = program(ENTRY + while_of(0, None), loop(0, NEGATE))
    assert counts(module) == [("k0", 1, 8192), ("less0", 1, 4 + 4 + 1)]
    assert hlo_cost.waiting_loops(module) == ["w"]


@pytest.mark.parametrize(
    "branches", ["branch_computations={%fused, %other}", "true_computation=%fused, false_computation=%other"]
)
def test_every_branch_of_a_conditional_is_counted(branches):
    other = DOUBLE.replace("%fused", "%other").replace("twice", "same")
    entry = f"""
  %p = s32[] parameter(0)
  %x = f32[1024]{{0}} parameter(1)
  ROOT %c = f32[1024]{{0}} conditional(%p, %x, %x), {branches}"""
    assert counts(program(entry, DOUBLE + other)) == [("twice", 1, 8192), ("same", 1, 8192)]


def test_a_call_runs_what_it_calls():
    entry = "  %x = f32[1024]{0} parameter(0)\n  ROOT %c = f32[1024]{0} call(%x), to_apply=%fused"
    assert counts(program(entry, DOUBLE)) == [("twice", 1, 8192)]


@pytest.mark.parametrize(
    ("inside", "moved"),
    [
        # 8 of 1024 rows of 16 bytes, and an index: read 128 + 4, write 128
        ("ROOT %r = f32[8,4]{1,0} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={8,4}", 128 + 4 + 128),
        # the same through a bitcast
        (
            "%b = f32[1024,4]{1,0} bitcast(%p0)\n"
            "  %s = f32[8,4]{1,0} dynamic-slice(%b, %p1, %p1), dynamic_slice_sizes={8,4}\n"
            "  ROOT %r = f32[8,4]{1,0} negate(%s)",
            128 + 4 + 128,
        ),
        # two slices are read each
        (
            "%s = f32[8,4]{1,0} slice(%p0), slice={[0:8], [0:4]}\n"
            "  %u = f32[8,4]{1,0} slice(%p0), slice={[8:16], [0:4]}\n"
            "  ROOT %r = f32[8,4]{1,0} add(%s, %u)",
            2 * 128 + 128,
        ),
        # once more is read than there is: all of it, once
        ("ROOT %r = f32[4096,4]{1,0} gather(%p0, %p1), offset_dims={1}", 16384 + 4 + 65536),
        # sliced, and read whole as well
        (
            "%s = f32[8,4]{1,0} slice(%p0), slice={[0:8], [0:4]}\n"
            "  %n = f32[1024,4]{1,0} negate(%p0)\n"
            "  ROOT %r = (f32[8,4]{1,0}, f32[1024,4]{1,0}) tuple(%s, %n)",
            16384 + 128 + 16384,
        ),
        # not used at all
        ("ROOT %r = f32[2]{0} broadcast(%p1), dimensions={}", 4 + 8),
    ],
)
def test_a_fusion_reads_what_it_takes(inside, moved):
    fused = f"""
%fused (p0: f32[1024,4], p1: s32[]) -> f32[8,4] {{
  %p0 = f32[1024,4]{{1,0}} parameter(0)
  %p1 = s32[] parameter(1)
  {inside}
}}
"""
    entry = """
  %x = f32[1024,4]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %k = f32[8,4]{1,0} fusion(%x, %i), kind=kLoop, calls=%fused"""
    assert counts(program(entry, fused)) == [("k", 1, moved)]


UPDATE = """
%fused (p0: f32[128,16], p1: s32[], p2: f32[1,16]) -> f32[128,16] {
  %p2 = f32[1,16]{1,0} parameter(2)
  %p0 = f32[128,16]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %z = s32[] constant(0)
  %n = f32[1,16]{1,0} negate(%p2)
  %d = f32[128,16]{1,0} dynamic-update-slice(%p0, %n, %p1, %z)
  ROOT %b = f32[2048]{0} bitcast(%d)
}
"""
BUFFERS = """
  %x = f32[128,16]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %u = f32[1,16]{1,0} parameter(2)
"""


@pytest.mark.parametrize(
    ("kernel", "moved"),
    [
        ("ROOT %k = f32[2048]{0} fusion(%x, %i, %u), kind=kLoop, calls=%fused", 64 + 4 + 64),
        ("ROOT %k = f32[128,16]{1,0} dynamic-update-slice(%x, %u, %i, %i)", 64 + 4 + 64),
        ("ROOT %k = f32[1,16]{1,0} dynamic-slice(%x, %i, %i), dynamic_slice_sizes={1,16}", 64 + 4 + 64),
    ],
)
def test_an_update_in_place_moves_the_slice_alone(kernel, moved):
    assert counts(program(BUFFERS + "  " + kernel, UPDATE)) == [("k", 1, moved)]


def test_an_asynchronous_kernel_is_counted_where_it_starts():
    entry = """
  %x = f32[1024]{0} parameter(0)
  %s = ((f32[1024]{0}), f32[1024]{0}, u32[]) fusion-start(%x), kind=kLoop, calls=%fused
  %d = f32[1024]{0} fusion-done(%s)
  %cs = (f32[1024]{0}, f32[1024]{0}, u32[]) copy-start(%d)
  ROOT %cd = f32[1024]{0} copy-done(%cs)"""
    assert counts(program(entry, DOUBLE)) == [("s", 1, 8192), ("cs", 1, 8192)]


def test_phases_are_the_innermost_scope_or_that_of_the_loop():
    inside = (
        '%a = f32[1024]{0} negate(%y0), metadata={op_name="jit(f)/improve/while/body/vmap(diagnostics)/neg"}\n'
        '  %b = f32[1024]{0} negate(%a), metadata={op_name="jit(f)/transpose(jvp(rollout))/neg"}\n'
        "  %k0 = f32[1024]{0} copy(%b)"
    )
    module = program(ENTRY + while_of(0, 2, "jit(f)/improve/while"), loop(0, inside))
    phases = [hlo_cost.phase_of(kernel, gpu_cost.PHASES) for kernel in hlo_cost.kernels(module)]
    assert phases == ["diagnostics", "rollout", "improve"]
    outside = program(ENTRY + while_of(0, 2, "jit(f)/while"), loop(0, NEGATE))
    assert [hlo_cost.phase_of(kernel, gpu_cost.PHASES) for kernel in hlo_cost.kernels(outside)] == ["other"]


def test_an_update_is_made_of_the_four_phases():
    config = tiny()
    state = jax.eval_shape(functools.partial(ppo.init, config, ppo.HParams()), jax.random.key(0))
    lowered = jax.jit(functools.partial(ppo.update, config, ppo.HParams())).lower(state)
    names = re.findall(r'"jit\(update\)/([^"]+)"', lowered.as_text(debug_info=True))
    assert set(gpu_cost.PHASES) <= {name.split("/")[0] for name in names}


def test_a_fusion_without_a_name_has_that_of_what_it_holds():
    named = DOUBLE.replace("add(%p0, %p0)", 'add(%p0, %p0), metadata={op_name="jit(f)/estimate/add"}')
    entry = "  %x = f32[1024]{0} parameter(0)\n  ROOT %k = f32[1024]{0} fusion(%x), kind=kLoop, calls=%fused"
    assert [kernel.op_name for kernel in hlo_cost.kernels(program(entry, named))] == ["jit(f)/estimate/add"]


def test_a_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo_cost.parse("HloModule m\n")
    with pytest.raises(ValueError, match="not an instruction: 'what is this'"):
        program("  what is this")


def test_loops_that_jax_compiles():
    """On a CPU, where what is fused is up to the compiler, only the trips are known by hand."""

    def known(x):
        return jax.lax.scan(lambda x, _: (jnp.sin(x) @ x, None), x, length=7)[0]

    def unknown(x):
        return jax.lax.while_loop(lambda x: x.sum() < 1e3, lambda x: jnp.sin(x) @ x, x)

    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    module = hlo_cost.parse(jax.jit(known).lower(x).compile().as_text())
    assert max(kernel.times for kernel in hlo_cost.kernels(module)) == 7
    assert not hlo_cost.waiting_loops(module)
    assert len(hlo_cost.waiting_loops(hlo_cost.parse(jax.jit(unknown).lower(x).compile().as_text()))) == 1


@needs_compiler
def test_programs_compiled_for_the_chip():
    def of(function, *shapes):
        args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        return hlo_cost.parse(gpu_cost.compile_for_gpu(function, *args))

    assert [kernel[3:5] for kernel in hlo_cost.kernels(of(lambda x: jnp.sin(x) * 2, (1 << 20,)))] == [(1, 8 << 20)]

    [product] = hlo_cost.kernels(of(lambda x, y: x @ y, (512, 128, 64), (512, 64, 64)))
    assert product.kind.startswith("triton gemm")
    assert product.num_bytes == 4 * 512 * (128 * 64 + 64 * 64 + 128 * 64)

    def nested(x):
        inner = lambda x: jax.lax.scan(lambda x, _: (jnp.sin(x), None), x, length=5)[0]  # noqa: E731
        return jax.lax.scan(lambda x, _: (inner(x), None), x, length=3)[0]

    sines = [kernel for kernel in hlo_cost.kernels(of(nested, (1 << 20,))) if "sin" in kernel.name]
    assert sum(kernel.times for kernel in sines) == 15
    assert {kernel.num_bytes for kernel in sines} == {8 << 20}

    searching = of(lambda x: jax.lax.while_loop(lambda x: x.sum() < 1e3, jnp.sin, x), (1 << 20,))
    assert len(hlo_cost.waiting_loops(searching)) == 1


def kept(num_kernels: float, num_bytes: float) -> str:
    """A page whose one program has so many kernels and bytes an update."""
    return gpu_cost.page([counted(num_kernels, num_bytes)])


def counted(num_kernels: float, num_bytes: float) -> gpu_cost.Program:
    times = round(gpu_cost.UPDATES * num_kernels)
    kernel = hlo_cost.Kernel("k", "copy", "", times, round(num_bytes / num_kernels), "jit(f)/improve")
    return gpu_cost.Program("default", 4096, [kernel], [], 4096 * 512)


@pytest.fixture
def any_version(monkeypatch):
    monkeypatch.setattr(gpu_cost.importlib.metadata, "version", lambda wheel: "0")


@pytest.mark.usefixtures("any_version")
def test_growth_beyond_the_table_is_named():
    page = kept(2000, 100e9)
    assert gpu_cost.read_totals(page) == {("default", 4096): (2000, 100)}
    assert gpu_cost.growth(counted(2080, 104e9), page) == []
    assert gpu_cost.growth(counted(1000, 50e9), page) == []
    [line] = gpu_cost.growth(counted(2120, 100e9), page)
    assert line.startswith("kernels of an update: 2,120.0, +6.0% over")
    [line] = gpu_cost.growth(counted(2000, 106e9), page)
    assert line.startswith("GB of an update: 106.0, +6.0% over")
    with pytest.raises(ValueError, match="no program 'bfloat16' of 4096 runs"):
        gpu_cost.growth(counted(2000, 100e9)._replace(variant="bfloat16"), page)


@pytest.mark.usefixtures("any_version")
def test_phases_add_up_to_the_total():
    program = counted(2000, 100e9)
    assert program.phases()["improve"] == program.total
    assert sum(cost.seconds for cost in program.phases().values()) == program.total.seconds


def test_the_kept_table_has_the_programs_that_are_checked():
    assert ("default", 4096) in gpu_cost.read_totals(gpu_cost.TABLE.read_text())
    assert set(gpu_cost.read_totals(gpu_cost.TABLE.read_text())) >= {("default", runs) for runs in (1, 64, 1024)}


def test_what_is_missing_is_said_in_one_line(monkeypatch, capsys):
    def absent(wheel):
        raise gpu_cost.importlib.metadata.PackageNotFoundError(wheel)

    monkeypatch.setattr(gpu_cost.importlib.metadata, "version", absent)
    assert gpu_cost.main([]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert 'pip install "jax==' in said


@pytest.mark.slow
@needs_compiler
def test_the_default_program_costs_no_more_than_the_table():
    """In a process of its own: the XLA flags of the tests would compile another program."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    path = [str(BENCHMARKS.parent), *filter(None, [environment.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu_cost.py"), "--check"],
        env=environment | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
