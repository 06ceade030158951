"""`from grpo import …`: all that people's own files need, without what takes long to import."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import grpo
from grpo import api

ROOT = Path(__file__).parents[2]
FOLDERS = ("grpo", "orchestrator", "infer", "trainer", "transport", "configs", "deploy", "docs", "tools", "benchmarks")


def test_every_name_is_there() -> None:
    assert [name for name in api.__all__ if not hasattr(grpo, name)] == []


def test_nothing_heavy_is_needed_for_it() -> None:
    code = (
        "import sys; sys.modules |= dict.fromkeys(('torch', 'transformers', 'vllm', 'matplotlib', 'wandb'))\n"
        "import grpo; assert 'orchestrator' not in sys.modules\n"
        "from grpo import Environment, Rubric, Episode"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_nobody_is_told_to_install_a_strangers_package_or_an_extra_that_is_not_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    files = [path for name in FOLDERS for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".md", ".yaml")]
    told: list[tuple[str, str]] = []
    for path in (*files, ROOT / "README.md", ROOT / "Makefile", ROOT / "deploy" / "Dockerfile"):
        told += re.findall(r"pip install[^\n]*?[ '\"]([\w.-]+)\[([\w,]+)\]", path.read_text())
    assert {package for package, _ in told} == {".", project["name"]} != {".", "grpo"}
    assert {extra for _, extras in told for extra in extras.split(",")} <= project["optional-dependencies"].keys()
