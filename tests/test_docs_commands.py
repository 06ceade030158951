"""README.md and docs/: commands are taken by their programs, code can be read, and paths and links are there."""

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpo.infer.cli
import grpo.orchestrator.cli
import grpo.trainer.cli
import pytest
import yaml

import grpo.cli
from grpo.cli import COMMANDS
from tests.grpo.run_folder import finish, found, write_ledger, write_metrics
from tests.pages import PAGES, README, ROOT

ELSEWHERE = (
    *("head", "export", "grpo-env", "grpo-train --replay", "grpo view", "grpo data", "grpo sft", "python -m"),
    *(
        "grpo evaluate",
        "grpo export",
        "grpo serve",
        "grpo chat",
        "grpo canary",
        "grpo judge",
        "grpo service",
        "pip ",
        "kubectl ",
        "python -m venv",
    ),
    "hf ",
)
"""Beginnings of commands that cannot be tried without doing what they do; tests of their pages run them."""
PROGRAMS: dict[str, Callable[[], Any]] = {
    **{"grpo": grpo.cli.main, "grpo-infer": grpo.infer.cli.main, "grpo-orch": grpo.orchestrator.cli.main},
    "grpo-train": grpo.trainer.cli.main,
}
FOLDERS = "benchmarks|configs|deploy|docs|environments|grpo|infer|orchestrator|service|tests|tools|trainer|transport"
NEEDS_GPU = "--sleep_mode"
OF_A_READER = {"RUN": "quickstart", "train.yaml": "quickstart"}
"""Names that stand for what a reader has."""


def test_every_page_is_in_the_sites_navigation_and_leads_only_to_what_is_there() -> None:
    pages = {page.path.name: page.text for page in PAGES if page is not README}
    assert set(re.findall(r"\b(\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.M)) == set(pages)
    links = {link for text in pages.values() for link in re.findall(r"\]\(([\w/.]+)(?:#[\w-]+)?\)", text)}
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


def test_every_path_that_a_page_names_is_there() -> None:
    named = [path for page in PAGES for path in re.findall(rf"(?:`|\()((?:{FOLDERS})/[\w/.-]*\w)", page.text)]
    assert len(named) > 100
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_each_page_that_a_message_names_is_told_by_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packages = [ROOT / name for name in FOLDERS.split("|") if name not in ("benchmarks", "docs", "tests", "tools")]
    texts = [path.read_text() for one in packages for kind in ("*.py", "*.yaml") for path in one.rglob(kind)]
    named = {name for text in texts for name in re.findall(r"grpo docs ([a-z_]+)", text)}
    assert len(named) > 10
    for name in named:
        monkeypatch.setattr(sys, "argv", ["grpo", "docs", name])
        with pytest.raises(SystemExit, match=r"^0$"):
            grpo.cli.main()
        assert capsys.readouterr().out == (ROOT / "docs" / f"{name}.md").read_text()


def test_python_and_yaml_of_the_pages_can_be_read() -> None:
    for block in (block for page in PAGES for block in page.blocks):
        {"python": ast.parse, "yaml": yaml.safe_load}.get(block.language, str)(block.text)


def commands() -> Iterator[str]:
    """Without what stands before the program: variables, and the cores that it gets."""
    for page, line in [(one, line) for one in PAGES for line in one.commands()]:
        command = re.sub(r"^(\w+=\S+ |taskset -c \S+ )+", "", line.strip())
        # Files of a page's own are there only for the tests of the page.
        of_page = ".py:" in command or any(name in command for name in page.files)
        if command and not command.startswith(("#", *ELSEWHERE)) and not of_page:
            yield command


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_each_command_is_taken(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *words = (OF_A_READER.get(word, word) for word in shlex.split(command, comments=True))
    if program == "make":
        subprocess.run(["make", "-n", *words], cwd=ROOT, check=True, capture_output=True, timeout=120)
        return
    if re.search(NEEDS_GPU, command) and not Path("/dev/nvidiactl").exists():
        pytest.skip("needs a GPU")
    cwd = ROOT
    if words[0] in COMMANDS and words[0] not in ("compare", "launch"):
        cwd, run = tmp_path, found(tmp_path / words[1])
        write_ledger(run)
        write_metrics(run)
        finish(run)
    elif "--dry-run" not in words:
        words.append("--dry-run")
    monkeypatch.chdir(cwd)
    monkeypatch.setattr(sys, "argv", [program, *words])
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(PROGRAMS[program]())
    assert ended.value.code in (None, 0)
