"""Who may import whom. The table is the one of docs/architecture.md; any other edge fails here."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "steadyrl"

GROUND = {"axes", "config", "task_config", "method", "presets", "recipe", "errors", "types"}
ALLOWED = {
    "axes": set(),
    "method": {"axes", "presets"},
    "task_config": {"axes"},
    "config": {"axes", "method", "task_config"},
    "recipe": {"axes", "config", "errors", "method"},
    "presets": set(),
    "errors": set(),
    "types": set(),
    "statistics": set(),
    "objective": GROUND,
    "diagnostics": GROUND,
    "models": GROUND,
    "tasks": GROUND,
    "engines": GROUND | {"models"},
    "trainer": GROUND | {"models", "objective", "diagnostics"},
    "pipeline": GROUND | {"engines", "trainer", "tasks", "objective", "diagnostics"},
    "evaluation": GROUND | {"engines", "models", "tasks", "statistics"},
    "reports": GROUND | {"objective", "diagnostics", "statistics"},
    "adapters": GROUND | {"objective", "diagnostics"},
    "inspection": GROUND | {"objective", "diagnostics", "reports"},
    "experiments": GROUND | {"reports", "run"},
    "planning": GROUND | {"models", "pipeline", "reports"},
    "assets": GROUND | {"models", "tasks"},
    "continuation": GROUND | {"reports", "trainer"},
    "run": GROUND | {"continuation", "engines", "evaluation", "models", "pipeline", "reports", "tasks", "trainer"},
    "__main__": {"cli"},
    "cli": GROUND | {"assets", "engines", "evaluation", "experiments", "inspection", "planning", "reports", "run"},
}
PURE = ("objective", "diagnostics", "statistics.py", "pipeline/schedule.py", "pipeline/packing.py")
IMPURE_IMPORTS = {"os", "time", "logging", "pathlib", "random", "sys", "io", "transformers"}
FILES = sorted(SOURCE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Every module that a file imports, `import a.b` and `from a.b import c` as a.b and a.b.c."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_follow_the_table(path):
    if path.name == "__init__.py":
        assert path.read_text(encoding="utf-8").strip() == "", "__init__.py files are empty"
        return
    inner = {name.split(".")[1] for name in imports(path) if name.startswith("steadyrl.")}
    extra = inner - ALLOWED[room(path)] - {room(path)}
    assert not extra, f"{room(path)} may not import {', '.join(sorted(extra))}"


@pytest.mark.parametrize(
    "path", [p for p in FILES if str(p.relative_to(SOURCE)).startswith(PURE)], ids=lambda p: p.name
)
def test_pure_files_do_no_io(path):
    tops = {name.split(".")[0] for name in imports(path)}
    assert not tops & IMPURE_IMPORTS
    assert "torch.distributed" not in imports(path)
    assert ".item()" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_module_hides_a_package_it_imports(path):
    assert path.stem not in {name.split(".")[0] for name in imports(path)} or path.stem == "steadyrl"


def test_there_is_no_utils_room():
    assert not [path for path in SOURCE.rglob("*") if path.stem in ("utils", "helpers", "misc", "common_utils")]


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("steadyrl.recipe", ["torch", "transformers", "numpy"]),
        ("steadyrl.objective.loss", ["transformers", "ray", "vllm", "sglang"]),
        ("steadyrl.diagnostics.mismatch", ["transformers", "ray", "vllm", "sglang"]),
        ("steadyrl.adapters.for_slime", ["transformers", "megatron", "ray", "steadyrl.models", "steadyrl.engines"]),
        ("steadyrl.cli", ["torch", "transformers", "matplotlib"]),
        ("steadyrl.reports.recorder", ["torch", "matplotlib"]),
    ],
)
def test_light_parts_stay_light(module, forbidden):
    code = f"import sys, {module}; print([name for name in {forbidden!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
