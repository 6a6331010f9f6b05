"""The arrows between the modules, and where side effects may stand, read from the source."""

import ast
import pathlib

import pytest

import purejaxppo

ROOT = pathlib.Path(purejaxppo.__file__).parent
MODULES = sorted(path.relative_to(ROOT).with_suffix("").as_posix() for path in ROOT.rglob("*.py"))

# Each part may import the parts before it; the parts of one line are on their own. A part is a module or a folder.
LAYERS = [
    ["types", "config", "ops", "devices", "estimates"],
    ["agent/__init__", "agent/envs", "agent/products"],
    ["agent/distributions", "agent/layers"],
    ["agent/networks"],
    ["agent/rollout", "agent/acting"],
    ["agent/ppo"],
    ["agent/trpo"],
    ["train", "bandit", "tokens/types", "tokens/objectives"],
    ["tokens/config", "tokens/model", "tokens/fitting"],
    ["tokens/sample", "tokens/reward", "tokens/improve"],
    ["tokens/checks", "tokens/names", "tokens/dpo"],
    ["tokens/tasks"],
    ["tokens/rlhf"],
    ["tokens/preferences", "tokens/segments"],
    ["tokens/__init__"],
    ["kinds"],
    ["plan", "settings", "results"],
    ["segments"],
    ["sweep"],
    ["host/files", "host/experiment"],
    ["host/programs"],
    ["host/memory", "host/cluster"],
    ["host/chunks", "host/checkpoints"],
    ["host/sweeps", "host/policy"],
    ["__init__"],
    ["host"],
]
LEAVES = {"types", "ops", "config", "devices", "estimates"}  # import nothing of the package but their own part


def tree(module):
    return ast.parse((ROOT / f"{module}.py").read_text())


def part_of(module):
    """The part that a module stands in, e.g. ops/kl -> ops."""
    for part in (name for layer in LAYERS for name in layer):
        if module == part or module.startswith(f"{part}/"):
            return part
    raise AssertionError(f"{module} is in no layer: add it to LAYERS")


def height(module):
    return next(i for i, layer in enumerate(LAYERS) if part_of(module) in layer)


def imports(module):
    """Full dotted names of everything imported, anywhere in the module."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(module):
    """The modules of the package that a module imports, as paths."""
    for name in imports(module):
        parts = name.split(".")
        if parts[0] != "purejaxppo":
            continue
        while parts[1:] and "/".join(parts[1:]) not in MODULES and "/".join([*parts[1:], "__init__"]) not in MODULES:
            parts.pop()  # the name of an object in a module
        path = "/".join(parts[1:])
        yield path if path in MODULES else f"{path}/__init__".lstrip("/")


def test_the_reading_of_imports_finds_them():
    assert {"agent/envs", "agent/networks", "agent/ppo", "agent/rollout", "config", "ops/__init__", "types"} <= set(
        own_imports("train")
    )
    assert "ops/kl" in set(own_imports("ops/__init__"))


@pytest.mark.parametrize("module", MODULES)
def test_arrows_point_one_way(module):
    for imported in own_imports(module):
        if part_of(imported) != part_of(module):
            assert height(imported) < height(module), f"{module} imports {imported}"
            assert part_of(module) not in LEAVES, f"{module} imports {imported}"


@pytest.mark.parametrize("module", MODULES)
def test_only_envs_imports_an_environment_suite(module):
    suites = {name for name in imports(module) if name.split(".")[0] in ("gymnax", "gymnasium", "brax", "jumanji")}
    assert not suites or module == "agent/envs"


@pytest.mark.parametrize("module", [module for module in MODULES if not module.startswith("host/")])
def test_nothing_outside_host_prints_or_opens_a_file(module):
    effects = {"print", "open", "input", "write_text", "write_bytes", "savez", "save", "savefig", "mkdir", "callback"}
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            assert name not in effects, f"{module}:{node.lineno} calls {name}"


@pytest.mark.parametrize("name", purejaxppo.__all__)
def test_public_names_exist_and_say_what_they_are(name):
    assert getattr(purejaxppo, name).__doc__
