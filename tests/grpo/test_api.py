"""`import grpo`: everything that people's own files and scripts need, without what takes long to import."""

import builtins
import inspect
import pydoc
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import grpo
from grpo import api

ROOT = Path(__file__).parents[2]
NAMES = ("configs", "deploy", "environments", "infer", "orchestrator", "trainer", "transport")
"""Our folders in the repository, which are parts of `grpo` where it is installed."""


def python(code: str, *words: str, cwd: Path | None = None) -> str:
    """Runs a program in a process of its own, and returns what it prints."""
    command = [sys.executable, *words, *(["-c", code] if code else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_name_can_be_seen_and_is_there() -> None:
    assert set(api.__all__) < set(grpo.__all__) <= set(dir(grpo))
    exec("from grpo import *", star := dict[str, object]())
    assert star.keys() - {"__builtins__"} == set(grpo.__all__)
    shown = pydoc.plain(pydoc.render_doc(grpo))
    assert [name for name in grpo.__all__ if not re.search(rf"\b{name}\b", shown)] == []
    with pytest.raises(AttributeError, match="statsu"):
        grpo.statsu  # noqa: B018


@pytest.mark.parametrize("words", [("-m", "grpo"), ("-m", "grpo.cli")])
def test_the_version_is_told(words: tuple[str, ...]) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert grpo.__version__ == version
    assert python("", *words, "--version") == f"grpo {version}\n"


def test_errors_that_public_docstrings_name_can_be_caught() -> None:
    """A name after "Raises", or in a section of it, is a built-in error or one of grpo's."""
    missing = set[str]()
    for name in grpo.__all__:
        found = getattr(grpo, name)
        members = [found, *(vars(found).values() if inspect.isclass(found) else ())]
        for member in members:
            text = inspect.getdoc(member) or ""
            said = re.findall(r"\b[Rr]aises?\b([^.]*)", text) + re.findall(
                r"^ {4}(\w+): ", text.partition("Raises:")[2], re.M
            )
            errors = re.findall(r"(?<![\w.])(?:[A-Z][a-z]+){2,}\b", " ".join(said))
            missing |= {f"{name}: {one}" for one in errors if not hasattr(builtins, one) and not hasattr(grpo, one)}
    assert missing == set()


def test_nothing_heavy_is_needed_for_it() -> None:
    code = (
        "import sys; sys.modules |= dict.fromkeys(('torch', 'transformers', 'vllm', 'matplotlib', 'wandb', 'pandas'))\n"
        "import grpo; assert not [name for name in sys.modules if name.startswith('grpo.')]\n"
        "from grpo import Environment, Rubric, Episode"
    )
    python(code)


def test_the_names_that_stand_for_those_of_other_frameworks_are_there() -> None:
    page = Path(__file__).with_name("other_names.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    codes = {code for row in rows for code in re.findall(r"`([A-Za-z_.]+)(?:\([^`]*\))?`", row[1])}
    named = {code for code in codes if code.partition(".")[0] in grpo.__all__}
    assert len(named) > 40
    assert all(one.startswith("advantage.") for one in codes - named)
    for one in named:
        name, _, member = one.partition(".")
        found = getattr(grpo, name)
        assert not member or member in dir(found) or member in found.__annotations__, one


@pytest.mark.parametrize("kind", ["module", "package", "folder"])
def test_a_script_keeps_its_own_modules_beside_it(tmp_path: Path, kind: str) -> None:
    """What lies beside a script comes first in its imports: no name of ours may be an ordinary word."""
    script = [f"import {name}" for name in NAMES]
    for name in NAMES:
        mine = tmp_path / f"{name}.py" if kind == "module" else tmp_path / name / "__init__.py"
        mine.parent.mkdir(exist_ok=True)
        if kind != "folder":
            mine.write_text("MINE = 1")
        script.append(f"assert {name}.MINE" if kind != "folder" else f"assert {str(tmp_path)!r} in {name}.__path__[0]")
    script += ["import grpo", "for name in grpo.__all__: getattr(grpo, name)"]
    script += ["try: grpo.train('quickstart', steps=-9)", "except grpo.SettingsError as error: print(error)"]
    (tmp_path / "script.py").write_text("\n".join(script))
    assert "max_steps" in python("", "script.py", cwd=tmp_path)


def test_nobody_is_told_to_install_a_strangers_package_or_an_extra_that_is_not_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folders = (*NAMES, "grpo", "docs", "tools", "benchmarks")
    files = [path for name in folders for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".md", ".yaml")]
    told: list[tuple[str, str]] = []
    for path in (*files, ROOT / "README.md", ROOT / "Makefile", ROOT / "deploy" / "Dockerfile"):
        told += re.findall(r"pip install[^\n]*?[ '\"]([\w.-]+)\[([\w,]+)\]", path.read_text())
    assert {package for package, _ in told} == {".", project["name"]} != {".", "grpo"}
    assert {extra for _, extras in told for extra in extras.split(",")} <= project["optional-dependencies"].keys()
