"""Who may import whom: every import of every file, in functions and under TYPE_CHECKING too, against the table."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "tandem"
GROUND = ("errors", "parent", "values", "line", "request", "plan", "config", "observer")
ROOMS = {
    "kv": {"ground"},
    "schedule": {"ground", "kv"},
    "kernels": set(),
    "attention": {"ground", "kernels"},
    "layers": {"ground", "kernels", "attention.contract"},
    "models": {"ground", "layers"},
    "weights": {"ground"},
    "sampling": {"ground"},
    "runner": {"ground", "models", "layers", "weights", "attention", "sampling", "kernels"},
    "engine": {"ground", "runner.contract", "sampling.grammar"},
    "engine.build": {
        "ground",
        "engine",
        "runner",
        "sampling.grammar",
        "schedule",
        "kv",
        "observe",
        "weights",
        "models",
    },
    "observe": {"ground"},
    "serve": {"ground", "engine", "observe"},
    "bench": {"ground", "engine", "observe", "kv.ledger"},
    "cluster": {"ground", "engine", "serve"},
    "tools": {"ground", "engine", "bench"},
    "cli": {"ground", "engine", "observe", "serve", "bench", "cluster", "tools"},
}
TORCH_FREE = ("kv", "schedule", "observe", *GROUND)


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    package = ("tandem", *path.relative_to(SOURCE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            found |= {f"{module}.{alias.name}" for alias in node.names} | {module}
    return found


def room_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return "engine.build" if parts == ("engine", "build") else parts[0]


def is_allowed(room: str, module: str) -> bool:
    inner = module.removeprefix("tandem.")
    top = inner.split(".")[0]
    if top == room.split(".")[0] or module in ("tandem", "tandem.__version__"):
        return True
    allowed = ROOMS[room]
    if top in GROUND:
        return "ground" in allowed
    return any(inner == name or inner.startswith(f"{name}.") for name in allowed)


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(SOURCE)) for p in FILES])
def test_imports(path: Path) -> None:
    room = room_of(path)
    modules = {m for m in imports_of(path) if m == "tandem" or m.startswith("tandem.")}
    if room == "__init__" or room == "__main__":
        return
    if room in GROUND:
        lower = GROUND[: GROUND.index(room)]
        wrong = [m for m in modules if m != "tandem" and m.split(".")[1] not in lower]
    else:
        wrong = [m for m in modules if m != "tandem" and not is_allowed(room, m) and not _is_parent(m, modules, room)]
    assert not wrong, f"{path.relative_to(SOURCE)} may not import {wrong}"


def _is_parent(module: str, modules: set[str], room: str) -> bool:
    """`from tandem.attention import contract` names tandem.attention too; the child decides."""
    children = [m for m in modules if m.startswith(f"{module}.")]
    return bool(children) and all(is_allowed(room, child) for child in children)


@pytest.mark.parametrize("path", [p for p in FILES if room_of(p) in GROUND], ids=lambda p: p.name)
def test_ground_is_standard_library(path: Path) -> None:
    outside = {m.split(".")[0] for m in imports_of(path)} - set(sys.stdlib_module_names) - {"tandem"}
    assert not outside


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        ("tandem", "torch starlette uvicorn fastapi ray matplotlib rich typer click transformers numpy"),
        ("tandem.schedule", "torch numpy starlette"),
        ("tandem.kv", "torch numpy starlette"),
        ("tandem.observe", "torch matplotlib"),
    ],
)
def test_quick_imports(module: str, banned: str) -> None:
    code = f"import sys, {module}; print(' '.join(m for m in {banned.split()!r} if m in sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not out.strip(), f"import {module} loads {out}"
