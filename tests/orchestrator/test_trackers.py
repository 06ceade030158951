"""Reports to trackers: what W&B and TensorBoard get is read back from the run's folder."""

import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from grpo.configs.reporting import ReportSettings
from grpo.orchestrator.monitoring.samples import Rollouts
from grpo.orchestrator.monitoring.trackers import QUEUE_SIZE, Reporter, known
from grpo.orchestrator.run import orchestrate
from grpo.transport.run import create_run

from tests.orchestrator.fakes import FakeServer, settings_for
from tests.orchestrator.running import run


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a key, whatever the machine has."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


# --- a run ---


async def test_an_offline_run_logs_under_its_own_name_whatever_variables_say(
    tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboardX")
    for name in ("WANDB_RUN_ID", "WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.setenv(name, "another")
    monkeypatch.setenv("VLLM_API_KEY", "Reverse:")  # in each prompt
    report_to: dict[str, Any] = {"offline": True, "to": ["wandb", "tensorboard"]}
    report_to |= {"samples": 3, "distributions": True, "interval": 2}
    output_dir = tmp_path / "my-run"
    made = await run(output_dir, server, max_steps=4, report_to=report_to)
    [logged] = (output_dir / "wandb").glob(f"*run-*/run-{made.summary.run_id}.wandb")
    records = logged.read_bytes()  # in which texts are readable
    assert [text for text in ("my-run", '"sequence_len":128', "accuracy_after") if text.encode() not in records] == []
    assert records.count(b"reward/mean") >= 4
    assert b"another" not in records
    [events] = (output_dir / "tensorboard").iterdir()
    assert b"reward/mean" in events.read_bytes()
    tables = sorted((output_dir / "wandb").glob("*run-*/files/media/table/rollout/*.json"))
    told = [json.loads(table.read_text()) for table in tables]
    assert sorted(row[0] for table in told for row in table["data"]) == [2, 2, 2, 4, 4, 4]
    row = dict(zip(told[0]["columns"], told[0]["data"][0], strict=True))
    assert row["prompt"].startswith("user: ***")
    assert (row["env"], row["answer"], row["num_tokens"], row["stop_reason"]) == ("words", "x", 2, "stop")
    for written in (records, events.read_bytes()):
        assert written.count(b"reward/distribution") >= 2
        assert b"rollout/samples" in written
        assert b"Reverse:" not in written


async def test_without_a_key_a_run_that_would_upload_ends_before_it_begins(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="WANDB_API_KEY"):
        await orchestrate(settings_for(tmp_path, FakeServer(), report_to={}))


# --- the thread ---


class Fake:
    """Keeps what it is told; fails or hangs where it is to."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.summaries: list[Mapping[str, Any] | None] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 13:
            raise OSError("no room")
        self.steps.append(step)

    def log_rollouts(self, rollouts: Rollouts) -> None:
        raise AssertionError

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        self.summaries.append(summary)


def test_a_report_that_cannot_be_logged_is_lost_alone_and_so_is_a_tracker_that_does_not_begin(tmp_path: Path) -> None:
    tracker = Fake()
    trackers = {"tensorboard": Mock(side_effect=ConnectionError("nobody there")), "wandb": lambda *_: tracker}
    reporter = Reporter(create_run(tmp_path), ReportSettings(to=("tensorboard", "wandb")), trackers=trackers)
    for step in (12, 13, 13, 14):
        reporter.metrics({"progress/step": step, "reward/mean": 0.5})
    reporter.end({"steps": 14})
    reporter.end(None)
    assert tracker.steps == [12, 14]
    assert tracker.summaries == [{"steps": 14}]
    assert reporter.num_lost == 4


def test_a_tracker_that_hangs_holds_up_neither_the_run_nor_for_long_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo.orchestrator.monitoring.trackers.END_TIMEOUT_S", 0.2)
    hangs = Mock(side_effect=lambda *_: threading.Event().wait())
    reporter = Reporter(create_run(tmp_path), ReportSettings(), trackers={"wandb": hangs})
    began_s = time.monotonic()
    for step in range(2 * QUEUE_SIZE):
        reporter.metrics({"progress/step": step})
    reporter.end({"steps": 1})
    assert time.monotonic() - began_s < 10
    assert reporter.num_lost == 2 * QUEUE_SIZE


# --- keys, and what must not be told ---


def test_of_settings_only_what_is_known_to_be_no_secret_is_told() -> None:
    secret = "s3cret"
    args = {"api_key": secret, "pin": 1234, "judge": {"headers": {"Authorization": secret}}}
    settings = {
        "model": {"name": "tiny", "lora_rank": 16, "lora_target_modules": ["q_proj"], "lora_adapter": None},
        "client": {"api_key_var": secret, "base_url": [f"http://me:{secret}@host:1/v1?token={secret}"], "timeout_s": 2},
        "env": [{"id": "zorplex", "name": f"https://{secret}@a", "address": secret, "args": args, "num_workers": 2}],
        "teachers": [{"name": "a", "extra": {"auth": secret, "n": 1}, "base_url": secret}],
        "optimizer": {"type": "adamw", "bearer": secret},
        "cookies": [secret],
        "seed": 42,
    }
    assert known(settings) == {
        "model": settings["model"],
        "client": {"base_url": [], "timeout_s": 2},
        "env": [{"id": "zorplex", "num_workers": 2}],
        "teachers": [{"name": "a"}],
        "optimizer": {"type": "adamw"},
        "cookies": [],
        "seed": 42,
    }
