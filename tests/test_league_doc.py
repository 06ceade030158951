"""The code of docs/league.md runs as it stands there, and its tables name what there is."""

import asyncio
import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest
from grpo.configs.run import load_run
from grpo.orchestrator.rollouts.players import RULES
from grpo.orchestrator.rollouts.registry import make_environment

from grpo import play
from tests.pages import Page

PAGE = Page("docs/league.md")


def test_the_game_of_the_page_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PAGE.write_files(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    duel = importlib.import_module("duel").Duel()
    state = asyncio.run(play(duel, duel.dataset("train")[0], ["a", "word"]))
    assert len(state.players) == len(state.roles) == 1
    sys.modules.pop("duel")


def test_the_run_of_the_page_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PAGE.write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    [line] = re.findall(r"`(grpo quickstart [^`]+)`", PAGE.text)
    _, preset, *arguments = shlex.split(line)
    settings = load_run(preset, arguments)
    [env] = settings.orch.settings.env
    assert make_environment(env.id, env.args).pools["past"].keep == 16
    assert settings.infer.settings.max_loras == 3 * (settings.orch.settings.max_off_policy_steps + 2)


def test_the_rules_are_those_that_there_are() -> None:
    assert tuple(re.findall(r"^\| `(\w+)` \| (?:any,|in|those|the newest) ", PAGE.text, flags=re.M)) == RULES
