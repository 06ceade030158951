"""Which package may import which (design: "Where things live"), read from the source, lazy imports included."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import grpo

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "transport": set[str](),
    "configs": set[str](),
    "environments": set[str](),  # `from grpo import Environment`, as people's own files have it
    "infer": {"transport", "configs"},
    "orchestrator": {"transport", "configs"},
    "trainer": {"transport", "configs"},
    "service": {"transport", "configs", "trainer"},
    "deploy": {"transport", "configs", "infer", "orchestrator", "trainer"},
    "grpo": {"transport", "configs", "environments", "infer", "orchestrator", "trainer", "deploy", "service"},
}
PUBLIC = {"grpo", *(f"grpo.{name}" for name in grpo.__all__)}
"""What environments import, as people's own files do."""


def source_files(package: str) -> list[Path]:
    """The package's modules. The folders below `configs` are presets: scripts in them belong to no package."""
    return sorted((ROOT / package).glob("*.py" if package == "configs" else "**/*.py"))


def module_name(path: Path) -> str:
    """As it is installed: what stands beside `grpo` in the repository is a part of it."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "grpo" else ("grpo", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(name: str) -> str:
    """`trainer` of `grpo.trainer.loop`, `grpo` of what is its own."""
    parts = name.split(".")
    return parts[1] if parts[0] == "grpo" and len(parts) > 1 and parts[1] in ALLOWED else parts[0]


def imported_names(path: Path, node: ast.AST) -> Iterator[str]:
    """Dotted names that one statement imports; of `from a import b` both `a` and `a.b`."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        package = module_name(path).split(".")
        if path.name != "__init__.py":
            package = package[:-1]
        base = package[: len(package) - node.level + 1] if node.level else []
        start = ".".join([*base, *([node.module] if node.module else [])])
        yield start
        yield from (f"{start}.{alias.name}" for alias in node.names)


def every_import(path: Path) -> set[str]:
    return {name for node in ast.walk(ast.parse(path.read_text())) for name in imported_names(path, node)}


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    assert source_files(package)
    forbidden = set(ALLOWED) - ALLOWED[package] - {package}
    found = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in source_files(package)
        for name in every_import(path)
        if package_of(name) in forbidden and not (package == "environments" and name in PUBLIC)
    }
    assert not found


def test_no_module_imports_itself_in_a_circle() -> None:
    paths = {module_name(path): path for package in ALLOWED for path in source_files(package)}
    del paths["grpo"]  # imports each of its names when it is asked for; environments stand on it and are among them
    graph = {module: every_import(path) & set(paths) - {module} for module, path in paths.items()}
    # `from package import module` names the package too; its __init__ is a part of no circle that it does not close.
    TopologicalSorter(graph).prepare()  # the CycleError names a circle
