"""What the launcher shows of a run, from the run's folder."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deploy.progress import PlainDisplay, RunView, record_line, render
from deploy.restarts import AWAY
from transport.status import StatusFile

STEP = {
    "progress/step": 12.0,
    "reward/mean": 0.5124,
    "perf/generate_tokens_per_s": 4210.4,
    "policy/version": 12.0,
    "policy/lag_mean": 1.0,
    "time/step_s": 2.345,
}
EVALUATION = {"progress/step": 0.0, "eval/accuracy": 0.4, "eval/accuracy/reverse-text": 0.4}
STEP_LINE = "step 12/80  reward 0.512  tokens/s 4,210  policy v12  lag 1.00  seconds 2.35"


@pytest.fixture
def view(tmp_path: Path) -> RunView:
    (tmp_path / "status").mkdir()
    return RunView(tmp_path, max_steps=80, address=("127.0.0.1", 9))


def test_lines_that_an_orchestrator_takes_back_when_it_goes_on_do_not_stop_it(view: RunView) -> None:
    write(view, STEP, STEP)
    view.new_records()
    (view.folder / "metrics.jsonl").write_text(json.dumps(STEP) + "\n")
    assert view.new_records() == []
    write(view, EVALUATION)
    assert view.new_records() == [EVALUATION]
    with (view.folder / "metrics.jsonl").open("a") as file:
        file.write('rest of a line"}\n')
    assert view.new_records() == []


def test_a_server_that_is_away_is_shown_so_until_it_serves_again(view: RunView) -> None:
    status = StatusFile(view.folder / "status" / "infer.json")
    for state in (AWAY, "starting"):
        status.set(state)
        assert view.states()["infer"][0] == state
    status.set("serving", step=3)
    assert view.states()["infer"] == ("starting", None)  # nobody answers at its address


def write(view: RunView, *records: dict[str, float], end: str = "\n") -> None:
    with (view.folder / "metrics.jsonl").open("a") as file:
        file.write("\n".join(json.dumps(record) for record in records) + end)


def drawn(view: RunView) -> str:
    console = Console(width=120, force_terminal=False)
    with console.capture() as capture:
        console.print(render(view))
    return capture.get()


def test_a_step_is_one_line() -> None:
    assert record_line(STEP, 80) == STEP_LINE
    assert record_line({"progress/step": 3.0, "reward/mean": 1.0}, None) == "step 3  reward 1.000"


def test_an_evaluation_is_one_line() -> None:
    assert record_line(EVALUATION, 80) == "evaluation of v0  reverse-text 0.400"


def test_lines_are_read_once_and_only_when_they_are_whole(view: RunView) -> None:
    assert view.new_records() == []
    write(view, EVALUATION, STEP, end="")
    assert view.new_records() == [EVALUATION]
    write(view, end="\n")
    assert view.new_records() == [STEP]
    assert view.new_records() == []
    assert (view.last_step, view.last_evaluation) == (STEP, EVALUATION)


def test_states_say_who_waits_for_whom(view: RunView) -> None:
    assert view.states() == dict.fromkeys(("infer", "orch", "train"), ("starting", None))
    status = StatusFile(view.folder / "status" / "train.json")
    status.set("waiting", step=3, waiting_for="orchestrator: batch 3")
    state, since_s = view.states()["train"]
    assert state == "waiting (step 3) for orchestrator: batch 3"
    assert since_s is not None
    assert 0 <= since_s < 5
    status.set("starting", waiting_for="inference servers")
    assert view.states()["train"][0] == "starting, waits for inference servers"
    status.set("training", step=3)
    assert view.states()["train"][0] == "training (step 3)"


def test_the_server_of_a_teacher_is_shown_where_there_is_one(view: RunView) -> None:
    StatusFile(view.folder / "status" / "teacher.json").set("serving")
    assert view.states()["teacher"][0] == "serving"
    assert "grpo-teacher  serving, 0 s" in drawn(view)


def test_a_server_serves_when_its_port_answers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        view = RunView(tmp_path, max_steps=None, address=server.getsockname())
        assert view.states()["infer"] == ("serving", None)


def test_the_table_shows_step_reward_speed_policy_lag_and_states(view: RunView) -> None:
    assert "step 0/80" in drawn(view)
    write(view, STEP, EVALUATION)
    view.new_records()
    StatusFile(view.folder / "status" / "orch.json").set("waiting", waiting_for="trainer: version 12")
    text = drawn(view)
    assert all(part in text for part in STEP_LINE.split("  "))
    assert "evaluation of v0  reverse-text 0.400" in text
    assert "grpo-orch   waiting for trainer: version 12, 0 s" in text


def test_without_a_terminal_states_are_printed_until_the_first_step_and_then_steps(
    view: RunView, capsys: pytest.CaptureFixture[str]
) -> None:
    status: Any = StatusFile(view.folder / "status" / "train.json")
    with PlainDisplay(view) as display:
        display.tick()
        display.tick()
        status.set("loading the model")
        write(view, STEP)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"run folder {view.folder}",
        *(f"  0 s  grpo-{r}: starting" for r in ("infer", "orch", "train")),
        STEP_LINE,
    ]
