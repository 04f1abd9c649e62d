"""The order of the four packages, what may never be loaded, and the shape of their modules."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ORDER = ("profiles", "runtime", "lowering", "planner")
MODULES = sorted(path for package in ORDER for path in (ROOT / package).rglob("*.py"))
MAX_LINES = 400

# What a phone does not have; the runtime must not need it, not even late
NEVER_ON_DEVICE = {"torch", "torch_mlir", "onnx", "onnxscript", "transformers"}
# What `plan --help` would spend seconds on
HEAVY = {*NEVER_ON_DEVICE, "onnxruntime", "ortools", "networkx"}

every_module = pytest.mark.parametrize(
    "path", MODULES, ids=[str(path.relative_to(ROOT)) for path in MODULES]
)


def imported_names(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of each import in a module of ``package``.

    Sees imports inside functions and under TYPE_CHECKING, relative ones, and
    ``import_module`` or ``__import__`` with a literal name.
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=aliases):
                yield from ((node.lineno, alias.name) for alias in aliases)
            case ast.ImportFrom(level=0, module=str(name)):
                yield node.lineno, name
            case ast.ImportFrom(level=level, module=name):
                parts = package.split(".")
                base = parts[: len(parts) - level + 1]
                yield node.lineno, ".".join([*base, name] if name else base)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name
            case _:
                pass


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    package = ".".join(path.relative_to(ROOT).parent.parts)
    for line, name in imported_names(path.read_text(encoding="utf-8"), package):
        yield line, name.split(".")[0]


def test_imported_names_sees_every_form_of_import() -> None:
    source = """
import torch.nn as nn, json
from onnx import helper
from . import words
from .svg import draw
from ..cost import price
def late():
    import transformers
    importlib.import_module("ortools.sat")
    __import__("networkx")
"""
    assert [name for _, name in sorted(imported_names(source, "planner.inspect"))] == [
        "json",
        "torch.nn",
        "onnx",
        "planner.inspect",
        "planner.inspect.svg",
        "planner.cost",
        "transformers",
        "ortools.sat",
        "networkx",
    ]


def test_every_package_has_modules() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in MODULES} == set(ORDER)


@every_module
def test_no_module_imports_from_a_later_package(path: Path) -> None:
    own = path.relative_to(ROOT).parts[0]
    later = ORDER[ORDER.index(own) + 1 :]
    assert [(line, name) for line, name in imports_of(path) if name in later] == []


@every_module
def test_no_module_imports_the_tests(path: Path) -> None:
    assert [line for line, name in imports_of(path) if name in {"tests", "benchmarks"}] == []


@pytest.mark.parametrize("package", ["profiles", "runtime"])
def test_what_runs_on_a_device_imports_no_compiler(package: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}": name
        for path in (ROOT / package).rglob("*.py")
        for line, name in imports_of(path)
        if name in NEVER_ON_DEVICE
    }
    assert found == {}


def test_importing_the_runtime_loads_no_compiler() -> None:
    code = "import runtime, sys; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = run([sys.executable, "-c", code]).stdout.split()
    assert "runtime" in loaded
    assert NEVER_ON_DEVICE.intersection(loaded) == set()


def test_plan_help_loads_nothing_heavy() -> None:
    command = Path(sys.executable).parent / "plan"
    result = run([sys.executable, "-X", "importtime", str(command), "--help"])
    assert "compile" in result.stdout
    # Lines read "import time: SELF | CUMULATIVE | NAME"
    names = [line.rpartition("|")[2].strip() for line in result.stderr.splitlines()]
    loaded = {name.split(".")[0] for name in names}
    assert "planner" in loaded
    assert HEAVY & loaded == set()


@every_module
def test_no_module_is_called_utils(path: Path) -> None:
    words = {
        word for part in path.relative_to(ROOT).with_suffix("").parts for word in part.split("_")
    }
    assert not words & {"util", "utils", "helpers", "misc"}


@every_module
def test_no_module_is_longer_than_one_sitting(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
    )
    assert result.returncode == 0, result.stderr
    return result
