"""What models, rollouts and people's data say is shown on a terminal and does nothing there."""

import argparse
import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from grpo.orchestrator.ledger import Ledger
from grpo.orchestrator.monitoring.summary import Summary

from grpo.commands.chat import has_single_answers, talk
from grpo.server_process import ALIAS, ServerProcess
from tests.grpo.run_folder import found, grpo, says, write_metrics

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b1;1H\u202egnp\u2066 [/bold] [red]\r"


def does_nothing(screen: str) -> bool:
    """Whether it shows all of it, and only shows it."""
    return screen.replace("\n", "").isprintable() and "\\x1b]0;title" in screen and "[/bold]" in screen


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return found(tmp_path / "run")


def test_status(run: Path) -> None:
    says(run, "orch", "failed", message=HOSTILE)
    says(run, "train", HOSTILE, waiting_for=HOSTILE)
    assert does_nothing(grpo("status", run).stdout)


@pytest.mark.parametrize("question", [(), ("--group", "0")])
def test_ledger(run: Path, question: Sequence[str]) -> None:
    ledger = Ledger(run / "ledger.sqlite")
    ledger.issued(0, num=1, env=HOSTILE, example=1, version=0)
    ledger.dropped(["0/0"], HOSTILE)
    ledger.changes()()
    ledger.close()
    assert does_nothing(grpo("ledger", run, *question).stdout)


def test_data(tmp_path: Path) -> None:
    rows = [{"prompt": f"{HOSTILE} {number}", "answer": HOSTILE} for number in range(30)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert does_nothing(grpo("data", tmp_path / "data.jsonl").stdout)


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


def test_the_table_of_a_run_that_goes_on(run: Path) -> None:
    says(run, "orch", "failed", message=HOSTILE)
    code = f"from pathlib import Path; from grpo.commands.status import shown\nwith shown(Path({str(run)!r})): pass"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "300"})
    assert does_nothing(done.stdout)


class Repeats:
    """A server that answers with something hostile, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append((body["model"], len(body["messages"])))
        message = {"role": "assistant", "content": HOSTILE}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


@pytest.mark.parametrize(("keeps", "lengths"), [(True, [1, 3, 1]), (False, [1, 1, 1])])
async def test_chat_begins_anew_with_each_line_where_no_second_turn_was_trained(
    keeps: bool,
    lengths: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake, app = Repeats(), web.Application()
    app.router.add_post("/v1/chat/completions", fake.answer)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n\nthree\n"))
    options = argparse.Namespace(system=None, temperature=0.0, max_tokens=4)
    async with TestServer(app) as server:
        process: Any = None
        served = ServerProcess(
            url=str(server.make_url("")).rstrip("/"), base="base", key=None, process=process, log=tmp_path
        )
        await asyncio.to_thread(talk, served, options, keeps=keeps)
    assert [num for model, num in fake.asked if model == ALIAS] == lengths
    assert does_nothing(capsys.readouterr().out)


def test_a_run_has_single_answers_where_no_step_counts_turns(run: Path) -> None:
    assert not has_single_answers(run)  # nothing is known of a run without a step
    write_metrics(run)
    assert has_single_answers(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"progress/step": 3.0, "reward/mean": 0.5, "rollout/num_turns": 2.0}) + "\n")
    assert not has_single_answers(run)
