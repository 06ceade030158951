"""What models, rollouts and people's data say is shown on a terminal and does nothing there."""

import argparse
import asyncio
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from grpo.orchestrator.ledger import Ledger
from grpo.orchestrator.monitoring.summary import Summary

from grpo.commands.chat import has_single_answers, talk
from grpo.server_process import ALIAS, ServerProcess
from tests.grpo.run_folder import found, grpo, says, write_metrics
from tests.orchestrator.chat_server import chat_serving

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b1;1H\u202egnp\u2066 [/bold] [red]\r"


def does_nothing(screen: str) -> bool:
    """Whether it shows all of it, and only shows it."""
    return screen.replace("\n", "").isprintable() and "\\x1b]0;title" in screen and "[/bold]" in screen


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return found(tmp_path / "run")


@pytest.mark.parametrize("words", ["status run", "ledger run", "ledger run --group 0", "data a.jsonl"])
def test_commands(run: Path, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    says(run, "orch", "failed", message=HOSTILE)
    says(run, "train", HOSTILE, waiting_for=HOSTILE)
    ledger = Ledger(run / "ledger.sqlite")
    ledger.issued(0, num=1, env=HOSTILE, example=1, version=0)
    ledger.dropped(["0/0"], HOSTILE)
    ledger.changes()()
    ledger.close()
    rows = [{"prompt": f"{HOSTILE} {number}", "answer": HOSTILE} for number in range(30)]
    (run.parent / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert does_nothing(grpo(*words.split()).stdout)


def test_summary_and_its_warnings(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    warning = {"program": "grpo-orch", "kind": "", "message": HOSTILE, "step": 1, "times": 2}
    fields: dict[str, Any] = dict.fromkeys(Summary.__dataclass_fields__, 0.0)
    fields |= {"run_id": "a", "accuracies": {}, "seconds": {}, "tokens": {}, "rollouts_dropped": {HOSTILE: 1}}
    measured = {f"eval/measure/{HOSTILE}{number}": 1.0 for number in range(2)}
    Summary(**fields | {"evaluations": {"0": measured, "1": measured}, "warnings": [warning]}).print()
    screen = capsys.readouterr().out
    assert does_nothing(screen)
    assert screen.count("title") == 4


def test_the_summary_does_not_say_a_measure_that_is_the_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    fields: dict[str, Any] = dict.fromkeys(Summary.__dataclass_fields__, 0)
    fields |= {"run_id": "a", "accuracies": {}, "seconds": {}, "tokens": {}, "rollouts_dropped": {}, "warnings": []}
    lines = [
        {"eval/accuracy/words": one, "eval/measure/exact/words": one, "eval/measure/tidy/words": 1 - one}
        for one in (0.25, 0.875, 0.5)
    ]
    Summary(**fields | {"evaluations": dict(zip(("0", "4", "8"), lines, strict=True))}).print()
    screen = capsys.readouterr().out
    assert screen.count("0.25 → 0.5, at most 0.875") == 1
    assert screen.count("0.75 → 0.5") == 1


def test_the_table_of_a_run_that_goes_on(run: Path) -> None:
    says(run, "orch", "failed", message=HOSTILE)
    code = f"from pathlib import Path; from grpo.commands.status import shown\nwith shown(Path({str(run)!r})): pass"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "300"})
    assert does_nothing(done.stdout)


@pytest.mark.parametrize(("keeps", "lengths"), [(True, [1, 3, 1]), (False, [1, 1, 1])])
async def test_chat_begins_anew_with_each_line_where_no_second_turn_was_trained(
    keeps: bool,
    lengths: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n\nthree\n"))
    options = argparse.Namespace(system=None, temperature=0.0, max_tokens=4)
    async with chat_serving() as server:
        server.does |= dict.fromkeys(("base", ALIAS), lambda messages: HOSTILE)
        process: Any = None
        url = server.base_url.removesuffix("/v1")
        served = ServerProcess(url=url, base="base", key=None, process=process, log=tmp_path)
        await asyncio.to_thread(talk, served, options, keeps=keeps)
    assert [len(body["messages"]) for _, body in server.requests if body["model"] == ALIAS] == lengths
    assert does_nothing(capsys.readouterr().out)


def test_a_run_has_single_answers_where_no_step_counts_turns(run: Path) -> None:
    assert not has_single_answers(run)  # nothing is known of a run without a step
    write_metrics(run)
    assert has_single_answers(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"progress/step": 3.0, "reward/mean": 0.5, "rollout/num_turns": 2.0}) + "\n")
    assert not has_single_answers(run)
