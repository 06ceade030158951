"""What `grpo` shows of a run while it goes on."""

import contextlib
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from grpo.commands.status import shown
from tests.grpo.run_folder import found, says

STEP = {
    "progress/step": 12.0,
    "reward/mean": 0.5124,
    "perf/generate_tokens_per_s": 4210.4,
    "policy/version": 12.0,
    "policy/lag_mean": 1.0,
    "time/step_s": 2.345,
}
EVALUATION = {"progress/step": 0.0, "eval/accuracy": 0.4, "eval/accuracy/reverse-text": 0.4}
STEP_LINE = "step 12/2  reward 0.512  tokens/s 4,210  policy v12  lag 1.00  seconds 2.35"
EVALUATION_LINE = "evaluation of v0  reverse-text 0.400"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return found(tmp_path / "run")


def write(run: Path, *records: dict[str, float], end: str = "\n") -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n".join(json.dumps(record) for record in records) + end)


def test_without_a_terminal_states_are_printed_until_the_first_step_and_then_each_step_once(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(run, STEP | {"progress/step": 11.0})  # of a run that is gone on with
    with shown(run) as tick:
        says(run, "train", "waiting", step=12, waiting_for="orchestrator: batch 12")
        tick()
        tick()
        write(run, EVALUATION, STEP, end="")
    write(run, end="\n")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"run folder {run}"
    assert [line.partition("grpo-")[2] for line in lines[1:4]] == [
        "infer: not started",
        "orch: joined",
        "train: waiting in step 12, waits for orchestrator: batch 12",
    ]
    assert lines[4:] == [EVALUATION_LINE, STEP_LINE]


def test_a_run_folder_that_is_removed_meanwhile_is_the_launchers_to_see(run: Path) -> None:
    with shown(run) as tick:
        shutil.rmtree(run)
        tick()


def test_on_a_terminal_a_table_shows_the_newest_step_and_evaluation_and_what_each_program_does(run: Path) -> None:
    write(run, EVALUATION, STEP)
    says(run, "orch", "sampling", step=13)
    text = on_terminal(run)
    for part in (*STEP_LINE.split("  "), *EVALUATION_LINE.split("  "), "sampling in step 13"):
        assert part in text


def test_on_a_terminal_reward_and_accuracy_are_curves_and_the_time_left_is_the_pace_of_the_last_steps(
    run: Path,
) -> None:
    settings = json.loads((run / "run.json").read_text())
    settings["programs"]["orch"]["settings"]["max_steps"] = 20
    (run / "run.json").write_text(json.dumps(settings))
    rewards = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    steps = [STEP | {"progress/step": float(n), "reward/mean": one} for n, one in enumerate(rewards, 1)]
    evaluated = [EVALUATION | {"progress/step": v, "eval/accuracy": one} for v, one in ((0.0, 0.25), (8.0, 0.75))]
    write(run, *evaluated, *steps)
    text = on_terminal(run)
    assert "▁▂▃▄▅▆▇█" in text
    assert "▁█" in text
    assert "0.250 → 0.750" in text
    assert "28 s left" in text  # 12 steps of 2.345 s


def test_on_a_terminal_a_run_without_a_step_has_no_figures_and_what_it_warns_of_stands_above(run: Path) -> None:
    during = "import logging, grpo.transport.run_warnings as kept\n    with kept.kept_warnings(run, 'orch'): "
    during += "logging.getLogger('grpo.orchestrator').warning('all rewards are equal')"
    text = on_terminal(run, during)
    assert "step 0" not in text
    assert text.count("warning: grpo-orch: all rewards are equal") == 1
    assert "all rewards are equal" not in on_terminal(run)  # it came before


def on_terminal(run: Path, during: str = "pass") -> str:
    """What a terminal shows, without colours and the like."""
    code = f"from pathlib import Path; from grpo.commands.status import shown\nrun = Path({str(run)!r})\n"
    code += f"with shown(run):\n    {during}"
    reader, terminal = pty.openpty()
    with os.fdopen(terminal, "wb") as screen:
        environment = os.environ | {"COLUMNS": "160", "TERM": "xterm"}
        subprocess.run([sys.executable, "-c", code], stdout=screen, check=True, env=environment, timeout=120)
    drawn = b""
    with contextlib.suppress(OSError):  # Linux says so when all has been read
        while piece := os.read(reader, 65_536):
            drawn += piece
    os.close(reader)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn.decode())
