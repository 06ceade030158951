"""Reports to Weights & Biases, with the real library, offline: what it logs is read back from the run's folder."""

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from configs.reporting import ReportSettings
from orchestrator.loop import orchestrate
from orchestrator.monitoring.trackers import (
    COLUMNS,
    COMMAND,
    HIDDEN,
    QUEUE_SIZE,
    SAMPLES,
    NoReporter,
    WandbReporter,
    check_reports,
    config_of,
    open_reporter,
    without_secrets,
)
from tests.orchestrator.fakes import FakeServer, FakeTrainer, settings_for
from tests.orchestrator.wandb_files import logged
from transport.run import found_run, join_run

VARIABLES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "WANDB_MODE")
KEY = "0" * 40
LOST = "reports to Weights & Biases are being lost"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a key, whatever the machine has."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


# --- a run ---


async def test_an_offline_run_logs_every_line_of_metrics_the_settings_samples_and_distributions(tmp_path: Path) -> None:
    server = await FakeServer(lambda prompt, version: "abc").start()
    trainer, output_dir = FakeTrainer(tmp_path / "my-run"), tmp_path / "my-run"
    trainer.start()
    report_to = {"offline": True, "samples": 3, "distributions": True, "interval": 2}

    summary = await orchestrate(settings_for(output_dir, server, max_steps=4, report_to=report_to))
    await server.stop()

    run = logged(output_dir)
    assert (run.project, run.name, run.run_id, run.exit_code) == ("grpo", "my-run", summary.run_id, 0)
    assert run.step_metrics["*"] == "progress/step"
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    assert [
        {key: line[key] for key in line if key in lines[n]} for n, line in enumerate(metrics_of(run.history))
    ] == lines
    assert run.config["orch"]["report_to"]["samples"] == 3
    assert run.config["train"]["sequence_len"] == 128
    assert run.summary["accuracy_after"] == summary.accuracy_after
    assert summary.reports_lost == 0
    tables = run.table(SAMPLES)
    assert [[row[0] for row in rows] for _, rows in tables] == [[2, 2, 2], [4, 4, 4]]
    assert [columns for columns, _ in tables] == [list(COLUMNS)] * 2
    row = dict(zip(COLUMNS, tables[0][1][0], strict=True))
    assert row["prompt"].startswith("user: Reverse: ")
    assert (row["env"], row["answer"], row["num_tokens"], row["stop_reason"]) == ("reverse-text", "abc", 4, "stop")
    histograms = [line["rollout/num_tokens_distribution"] for line in run.history if "reward/distribution" in line]
    assert [(sum(one["values"]), line_step) for one, line_step in zip(histograms, (2, 4), strict=True)] == [
        (16, 2),
        (16, 4),
    ]


def metrics_of(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines without samples and distributions."""
    return [line for line in history if SAMPLES not in line]


async def test_without_a_key_a_run_that_would_upload_ends_before_it_begins(tmp_path: Path) -> None:
    server = FakeServer()
    with pytest.raises(ValueError, match=r"set WANDB_API_KEY, run `wandb login`, set report_to\.offline: true, or"):
        await orchestrate(settings_for(tmp_path, server, report_to={}))


def test_without_reports_the_library_is_not_even_imported() -> None:
    code = "import sys, orchestrator.loop, orchestrator.monitoring.trackers; sys.exit('wandb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_settings_nothing_is_reported(tmp_path: Path) -> None:
    assert isinstance(open_reporter(None, found_run(tmp_path)), NoReporter)


# --- one reporter ---


def begin(folder: Path, **changes: Any) -> dict[str, Any]:
    start = {"project": "p", "name": "n", "run_id": "r", "folder": str(folder), "offline": True, "config": {}}
    return start | changes


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_run_that_fails_is_logged_as_failed_what_it_logged_stays_and_nothing_is_left_running(tmp_path: Path) -> None:
    reporter = WandbReporter(begin(tmp_path), ReportSettings())
    reporter.metrics({"progress/step": 1, "reward/mean": 0.5})
    deadline = time.monotonic() + 120
    while not list((tmp_path / "wandb").glob("*run-*/*.wandb")):  # a run that fails waits for five seconds only
        assert time.monotonic() < deadline
        time.sleep(0.05)
    reporter.end(None)
    with pytest.raises(ProcessLookupError):
        os.killpg(reporter._process.pid, 0)
    run = logged(tmp_path)
    assert run.exit_code == 1
    assert [line["reward/mean"] for line in run.history] == [0.5]
    assert reporter.num_lost == 0


def test_where_the_orchestrator_is_killed_the_run_is_logged_as_failed_with_all_that_was_told(tmp_path: Path) -> None:
    lines = ({"begin": begin(tmp_path)}, {"metrics": {"progress/step": 1}})
    told = "".join(json.dumps(line) + "\n" for line in lines)
    ended = subprocess.run(COMMAND, input=told, stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    assert [next(iter(json.loads(line))) for line in ended.stdout.splitlines()] == ["began", "logged"]
    run = logged(tmp_path)
    assert (run.exit_code, len(run.history)) == (1, 1)


def test_a_process_that_dies_is_warned_of_once_its_reports_are_counted_and_nobody_else_notices(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = [sys.executable, "-c", "import sys; sys.stdin.readline(); sys.exit(3)"]
    reporter = WandbReporter(begin(tmp_path), ReportSettings(), command=command)
    for step in range(2 * QUEUE_SIZE):
        reporter.metrics({"progress/step": step})
    reporter.end({"steps": 1})
    assert reporter.num_lost == 2 * QUEUE_SIZE + 1
    warnings = warnings_of(caplog)
    assert sum(LOST in warning for warning in warnings) == 1
    assert warnings[-1] == f"{2 * QUEUE_SIZE + 1} of {2 * QUEUE_SIZE + 1} reports to Weights & Biases were lost"


def test_a_process_that_hangs_holds_up_neither_the_run_nor_for_long_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    reporter = WandbReporter(begin(tmp_path), ReportSettings(), command=command, end_timeout_s=0.2)
    large = {f"reward/{n}": 0.5 for n in range(200)}
    began_s = time.monotonic()
    for _ in range(2 * QUEUE_SIZE):
        reporter.metrics(large)
    reporter.end({"steps": 1})
    assert time.monotonic() - began_s < 60
    assert reporter.num_lost == 2 * QUEUE_SIZE + 1
    warnings = warnings_of(caplog)
    assert sum(LOST in warning and f"{QUEUE_SIZE} reports wait already" in warning for warning in warnings) == 1
    assert any("has not taken all reports in time" in warning and str(tmp_path) in warning for warning in warnings)


def test_a_server_that_cannot_be_reached_costs_the_reports_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    reporter = WandbReporter(begin(tmp_path, offline=False), ReportSettings(), end_timeout_s=60)
    reporter.metrics({"progress/step": 1})
    reporter.end({"steps": 1})
    assert reporter.num_lost == 2
    assert sum(LOST in warning for warning in warnings_of(caplog)) == 1


def test_a_report_that_cannot_be_logged_is_lost_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reporter = WandbReporter(begin(tmp_path), ReportSettings())
    reporter._tell({"tables": {"rollout/x": {"columns": ["a"], "rows": [[1, 2]]}}})
    reporter.metrics({"progress/step": 2})
    reporter.end({"steps": 2})
    assert reporter.num_lost == 1
    assert [line["progress/step"] for line in logged(tmp_path).history] == [2]
    assert any("ValueError" in warning for warning in warnings_of(caplog))


def test_project_and_name_are_those_of_the_settings_whatever_variables_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "another")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("WANDB_PROJECT", "another")
    folder = found_run(tmp_path)
    open_reporter(ReportSettings(project="mine", name="first", offline=True), folder).end({"steps": 1})
    run = logged(tmp_path)
    assert (run.run_id, run.project, run.name) == (folder.run_id, "mine", "first")


# --- keys, and what must not be told ---


OWN_SERVER = {"WANDB_BASE_URL": "https://wandb.example.org"}


@pytest.mark.parametrize(
    ("variables", "netrc"),
    [
        ({"WANDB_API_KEY": KEY}, ""),
        ({"WANDB_IDENTITY_TOKEN_FILE": "token.jwt"}, ""),
        ({}, f"machine api.wandb.ai login user password {KEY}"),
        (OWN_SERVER, f"machine wandb.example.org login user password {KEY}"),
    ],
    ids=["variable", "identity", "netrc", "own server"],
)
def test_a_key_is_found_where_the_library_looks_for_it(
    variables: dict[str, str], netrc: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "netrc").write_text(netrc + "\n")
    (tmp_path / "netrc").chmod(0o600)
    check_reports(ReportSettings())


def test_the_key_of_another_server_does_not_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("WANDB_BASE_URL", OWN_SERVER["WANDB_BASE_URL"])
    with pytest.raises(ValueError, match=r"has one for wandb\.example\.org"):
        check_reports(ReportSettings())


@pytest.mark.parametrize(("mode", "offline"), [("offline", False), ("disabled", False), ("online", True)])
def test_a_variable_that_contradicts_the_settings_is_an_error(
    mode: str, offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", mode)
    with pytest.raises(ValueError, match=f"WANDB_MODE is '{mode}', and report_to.offline: {str(offline).lower()}"):
        check_reports(ReportSettings(offline=offline))
    check_reports(None)


def test_texts_that_look_like_secrets_are_not_told() -> None:
    settings = {
        "client": {"api_key_var": "VLLM_API_KEY", "base_url": ("http://me:pw@host:1/v1", "http://host:2/v1")},
        "env": [{"args": {"api_key": "s3cret", "max_tokens": 5, "password": "", "judge": {"auth_token": "s3cret"}}}],
        "buffer": {"hash_keys": ["task"]},
    }
    assert without_secrets(settings) == {
        "client": {"api_key_var": "VLLM_API_KEY", "base_url": [f"http://{HIDDEN}@host:1/v1", "http://host:2/v1"]},
        "env": [{"args": {"api_key": HIDDEN, "max_tokens": 5, "password": "", "judge": {"auth_token": HIDDEN}}}],
        "buffer": {"hash_keys": ["task"]},
    }


def test_a_program_that_records_no_settings_is_told_by_what_the_launcher_gave_it(tmp_path: Path) -> None:
    run = found_run(tmp_path)
    join_run(tmp_path, role="train", settings={"seed": 1}, timeout_s=1)
    (tmp_path / "settings").mkdir()
    for role in ("infer", "train"):
        (tmp_path / "settings" / f"{role}.yaml").write_text("seed: 2\n")
    assert config_of(run) == {"run_id": run.run_id, "train": {"seed": 1}, "infer": {"seed": 2}}
