"""What a compiled program makes a GPU do: its kernels, and the bytes that each has to move.

Read from the text of a scheduled XLA program (`compiled.as_text()`), so it needs no GPU, and the same program always
costs the same. The rules:

- An instruction of the entry, of a loop's body or of a branch is one kernel, unless it only names memory that exists.
- A loop runs its body as often as its known trip count says. Without one the device has to tell the host after every
  iteration whether to go on: such a loop waits for the host, and is counted as a single iteration.
- Of a conditional every branch is counted, as if all of them ran.
- A kernel reads each operand once and writes its result once. Of an operand that it only slices or gathers it reads
  what it takes; `dynamic-update-slice` works in place and moves the update alone. What a fusion makes and uses inside
  stays in registers.
- A kernel takes bytes / BANDWIDTH, and at least LAUNCH.

So times are lower bounds with a floor, good for comparing programs: caches, occupancy and arithmetic are left out, and
a sort is one kernel.
"""

import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

BANDWIDTH = 4.3e12  # bytes/s that copies reach on an H200
LAUNCH = 1e-6  # s, a kernel inside a CUDA graph

# Instructions that run no kernel; `iota` and `constant` are made when the program is loaded, or fused.
NO_KERNEL = {"parameter", "constant", "iota", "tuple", "get-tuple-element", "bitcast", "opt-barrier"}
NO_KERNEL |= {"after-all", "partition-id", "replica-id"}
TAKES = {"slice", "dynamic-slice", "gather"}  # what they read of their first operand is what they return

COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)$")
ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
NAME = re.compile(r"%([\w.\-]+)")
TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
BRANCHES = re.compile(r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=(%[\w.\-]+))")
OP_NAME = re.compile(r'op_name="([^"]*)"')
TARGET = re.compile(r'custom_call_target="([^"]*)"')


class Instruction(NamedTuple):
    """One line of a program: `name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool


Computation = dict[str, Instruction]  # by name, in the order they run


class Module(NamedTuple):
    """A program: its computations by name, and the one that it starts with."""

    computations: dict[str, Computation]
    entry: str


class Kernel(NamedTuple):
    """One kernel, launched `times` times in a call of the program."""

    name: str
    kind: str  # opcode, with what emits it
    op_name: str  # where in the Python program it comes from: names of scopes and primitives; "" where XLA added it
    times: int
    num_bytes: int  # read and written by one launch
    loop: str  # op_name of the innermost loop around it, "" outside

    @property
    def seconds(self) -> float:
        """Of all launches."""
        return self.times * max(self.num_bytes / BANDWIDTH, LAUNCH)


class Cost(NamedTuple):
    """Of some kernels."""

    num_kernels: float  # launched
    num_bytes: float
    seconds: float


def parse(text: str) -> Module:
    """The program of `compiled.as_text()`.

    Raises:
      ValueError: for a text that has no entry, or a line in a computation that is no instruction.
    """
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in text.splitlines():
        if head := COMPUTATION.match(line):
            current = computations[head[2]] = {}
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and line.strip():
            instruction = _instruction(line)
            current[instruction.name] = instruction
    if entry is None:
        raise ValueError("no ENTRY: not the text of a compiled program")
    return Module(computations, entry)


def size_of(shape: str) -> int:
    """Bytes of an array, or of all arrays of a tuple.

    Args:
      shape: such as "f32[8,64]{1,0}" or "(f32[], bf16[4]{0})"; tokens have no size.
    """
    arrays = ((dtype, [int(dim) for dim in dims.split(",") if dim]) for dtype, dims in ARRAY.findall(shape))
    return sum(_size_of(dtype, math.prod(dims)) for dtype, dims in arrays)


def kernels(module: Module) -> list[Kernel]:
    """Every kernel of a call of the program."""
    return list(_walk(module, module.entry, 1, ""))


def waiting_loops(module: Module) -> list[str]:
    """Names of the loops whose number of iterations the host does not know."""
    instructions = (i for computation in module.computations.values() for i in computation.values())
    return [i.name for i in instructions if i.opcode == "while" and _trip_count(i) is None]


def cost_of(launched: Iterable[Kernel]) -> Cost:
    """The kernels together."""
    launched = list(launched)
    return Cost(
        sum(kernel.times for kernel in launched),
        sum(kernel.times * kernel.num_bytes for kernel in launched),
        sum(kernel.seconds for kernel in launched),
    )


def phase_of(kernel: Kernel, phases: Iterable[str]) -> str:
    """The innermost of the named scopes that the kernel stands in, or else its loop does; "other" without one."""
    for op_name in (kernel.op_name, kernel.loop):
        if inside := [word for word in re.findall(r"\w+", op_name) if word in phases]:
            return inside[-1]
    return "other"


def _walk(module: Module, name: str, times: int, loop: str) -> Iterator[Kernel]:
    """The kernels of a computation that runs `times` times, inside `loop`."""
    computation = module.computations[name]
    for instruction in computation.values():
        opcode, attributes = instruction.opcode, instruction.attributes
        if opcode in NO_KERNEL or opcode.endswith("-done"):  # what is done was started, and counted there
            continue
        if opcode == "while":
            trips, inside = _trip_count(instruction), _op_name(instruction) or loop
            yield from _walk(module, _called(attributes, "body"), times * (trips or 1), inside)
            if trips is None:
                yield from _walk(module, _called(attributes, "condition"), times, inside)
        elif opcode == "conditional":
            for names in BRANCHES.findall(attributes):
                for branch in NAME.findall("".join(names)):
                    yield from _walk(module, branch, times, loop)
        elif opcode == "call":
            yield from _walk(module, _called(attributes, "to_apply"), times, loop)
        else:
            op_name, num_bytes = _source(module, instruction), _bytes_moved(module, computation, instruction)
            yield Kernel(instruction.name, _kind(instruction), op_name, times, num_bytes, loop)


def _bytes_moved(module: Module, computation: Computation, instruction: Instruction) -> int:
    """What one launch of an instruction of the computation reads and writes."""
    operands = [computation[name] for name in dict.fromkeys(instruction.operands) if name in computation]
    if "calls=" in instruction.attributes:
        fused = module.computations[_called(instruction.attributes, "calls")]
        operands = sorted((i for i in fused.values() if i.opcode == "parameter"), key=lambda i: int(i.operands[0]))
        written = _bytes_written(fused, next(i for i in fused.values() if i.is_root))
    else:
        fused = {instruction.name: instruction}
        if instruction.opcode.endswith("-start"):  # of a copy; its shape holds the operand too
            written = sum(size_of(operand.shape) for operand in operands)
        else:
            written = _bytes_written(computation, instruction)
    return written + sum(_bytes_read(fused, operand) for operand in operands)


def _bytes_read(fused: Computation, value: Instruction) -> int:
    """What the instructions of one kernel read of a value in memory."""
    whole, read = size_of(value.shape), 0
    for user in fused.values():
        if value.name not in user.operands or user.opcode == "parameter":
            continue
        if user.opcode == "bitcast":
            read += _bytes_read(fused, user)
        elif value.name != user.operands[0] or user.opcode not in TAKES | {"dynamic-update-slice"}:
            return whole
        elif user.opcode in TAKES:
            read += size_of(user.shape)
    return min(whole, read)


def _bytes_written(computation: Computation, root: Instruction) -> int:
    """What one kernel writes whose last instruction is `root`."""
    operands = [computation[name] for name in root.operands if name in computation]
    if root.opcode == "tuple":
        return sum(_bytes_written(computation, operand) for operand in operands)
    if root.opcode == "bitcast" and operands:
        return _bytes_written(computation, operands[0])
    return size_of((operands[1] if root.opcode == "dynamic-update-slice" else root).shape)


def _instruction(line: str) -> Instruction:
    found = INSTRUCTION.match(line)
    if not found:
        raise ValueError(f"not an instruction: {line.strip()[:100]!r}")
    root, name, shape, opcode, rest = found.groups()
    text, attributes = _split_operands(rest)
    operands = (text,) if opcode == "parameter" else tuple(NAME.findall(text))  # of a parameter its number
    return Instruction(name, shape, opcode, operands, attributes, bool(root))


def _split_operands(text: str) -> tuple[str, str]:
    """What stands before the parenthesis that closes the operands, and what stands after it."""
    depth = 1
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return text[:position], text[position + 1 :]
    return text, ""


def _size_of(dtype: str, num_elements: int) -> int:
    """Bytes of so many elements. The first number in the name of a type is its bits."""
    bits = 8 if dtype == "pred" else int((re.search(r"\d+", dtype) or "0")[0])
    return -(-num_elements * bits // 8)


def _trip_count(loop: Instruction) -> int | None:
    known = TRIP_COUNT.search(loop.attributes)
    return int(known[1]) if known else None


def _called(attributes: str, role: str) -> str:
    found = re.search(rf"\b{role}=%?([\w.\-]+)", attributes)
    if not found:
        raise ValueError(f"no {role} in {attributes[:200]!r}")
    return found[1]


def _op_name(instruction: Instruction) -> str:
    found = OP_NAME.search(instruction.attributes)
    return found[1] if found else ""


def _source(module: Module, instruction: Instruction) -> str:
    """The `op_name` of a kernel; of a fusion without one, the last that it holds."""
    fused: Computation = {}
    if "calls=" in instruction.attributes:
        fused = module.computations[_called(instruction.attributes, "calls")]
    return next(filter(None, map(_op_name, (instruction, *reversed(fused.values())))), "")


def _kind(instruction: Instruction) -> str:
    """The opcode, and for fusions and library calls what it is compiled to."""
    if target := TARGET.search(instruction.attributes):
        return target[1]
    if '"__triton' in instruction.attributes:
        return "triton gemm" if "gemm" in instruction.attributes else "triton fusion"
    kind = re.search(r"\bkind=k(\w+)", instruction.attributes)
    return f"{instruction.opcode} {kind[1].lower()}" if kind else instruction.opcode
