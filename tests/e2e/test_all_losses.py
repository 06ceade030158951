"""Rewards, hints and teachers' disagreement in one run, with real vLLM and teachers behind a real HTTP server; and how
such a run is looked into, with the page of `grpo --view`, its traces and the ledger."""

import json
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest
from grpo.orchestrator.auxiliary.preferences.pairs import pair_record
from grpo.transport.traces import trace_path

from grpo.view.traces import rollout, rollouts_of
from tests.e2e.runs import PROGRAMS, ROOT, Run
from tests.e2e.scripted_teachers import scripted_teachers
from tests.grpo.view.served import served
from tests.support import END_S

pytestmark = pytest.mark.e2e
NUM_STEPS, BATCH_SIZE = 8, 32
MODES = ("success", "wrong_format", "tool_spam", "wrong_answer")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A finished run, and what its launcher printed."""

    run: Run
    output: str


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """`grpo configs/all_channels --view`, for fewer steps, with weights by which they suffice; the page has answered
    meanwhile."""
    run = Run(tmp_path_factory.mktemp("all_channels") / "run")
    words = ["--max_steps", str(NUM_STEPS), "--orch.batch_size", str(BATCH_SIZE), "--orch.eval.num_examples", "24"]
    words += ["--train.loss.alpha_sdpo", "1", "--train.loss.beta_replay", "0.1", "--train.loss.silent_share", "1"]
    command = [str(PROGRAMS / "grpo"), "configs/all_channels", "--output_dir", str(run.folder), "--view", *words]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with (
        scripted_teachers("all_channels") as teachers,
        subprocess.Popen([*command, *teachers], cwd=ROOT, text=True, **pipes) as process,
    ):
        assert process.stdout is not None
        address = next(line for line in iter(process.stdout.readline, "") if line.startswith("http://")).strip()
        assert httpx.get(address, follow_redirects=True, timeout=END_S).status_code == 200
        output, _ = process.communicate(timeout=END_S)
    assert process.returncode == 0, output
    return Shown(run=run, output=output)


@pytest.fixture(scope="module")
def run(shown: Shown) -> Run:
    return shown.run


def test_every_step_learns_from_rewards_and_hints_and_from_pairs_once_teachers_have_answered(run: Run) -> None:
    assert len(run.steps) == NUM_STEPS
    for line in run.steps:
        shares = [line[f"optim/grad_share_{stream}"] for stream in ("policy", "sdpo", "dpo")]
        assert sum(shares) == pytest.approx(1)
        assert line["hints/given"] == line["hints/errors"]
    # In which step the first pairs are depends on when teachers have answered.
    pairs = [line.get("policy/dpo_pairs", 0) for line in run.steps]
    assert sum(pairs) > 0
    assert sum(line["pairs/made"] for line in run.steps) > 0
    assert all((line["optim/grad_share_dpo"] > 0) == (num > 0) for line, num in zip(run.steps, pairs, strict=True))
    assert sum(line["hints/given"] for line in run.steps) > BATCH_SIZE


def test_no_rollout_is_lost_and_what_is_trained_is_what_was_sampled(run: Run) -> None:
    assert run.summary["rollouts_dropped"] == {}
    assert run.summary["rollouts_trained"] == NUM_STEPS * BATCH_SIZE
    assert run.summary["mismatch_max_lag0"] < 1e-4


def test_calls_that_fail_become_rarer_and_each_answer_has_a_mode(shown: Shown) -> None:
    before, after = (shown.run.summary["evaluations"][version] for version in ("0", str(NUM_STEPS)))
    # 0.43, and 0 to 0.05 in 6 runs of different seeds
    assert before["eval/measure/tool_error_rate/zorplex"] > 0.3
    assert after["eval/measure/tool_error_rate/zorplex"] < 0.6 * before["eval/measure/tool_error_rate/zorplex"]
    for found in (before, after):
        assert sum(found[f"eval/measure/{mode}/zorplex"] for mode in MODES) == pytest.approx(1)
    # What succeeds is what is right, and the summary says each thing once.
    assert all(told in shown.output for told in ("accuracy, zorplex", *MODES[1:]))


def test_pairs_are_what_two_teachers_agree_on_against_the_policy(run: Run) -> None:
    with closing(sqlite3.connect(run.folder / "ledger.sqlite")) as ledger:
        pairs = [pair_record(data) for (data,) in ledger.execute("SELECT record FROM pairs")]
    assert pairs
    assert all("teachers: a, b" in pair.source for pair in pairs)
    for pair in pairs:
        assert pair.chosen != pair.rejected
        assert pair.chosen_ref_logprob < 0 > pair.rejected_ref_logprob


def test_a_failed_call_of_a_conversation_has_its_hint_beside_it(run: Run) -> None:
    traces: list[dict[str, Any]] = pq.read_table(trace_path(run.folder, 1)).to_pylist()
    errors = [[one["error"] for one in json.loads(row["messages"]) if "error" in one] for row in traces]
    assert sum(map(bool, errors)) > BATCH_SIZE * 0.5
    for row, messages in zip(traces, errors, strict=True):
        assert (row["hint"] is not None) == bool(messages)
        assert not messages or row["hint"].endswith(tuple(messages))


def test_the_trainer_completes_every_trace(run: Run) -> None:
    rows = rollouts_of(run.folder, 2)
    assert len(rows) == BATCH_SIZE
    assert all(row["mean_entropy"] is not None for row in rows)
    assert max(abs(row["max_log_ratio"]) for row in rollouts_of(run.folder, 1)) < 1e-3
    [row] = rollout(run.folder, 2, rows[0]["rollout"])
    sampled = [place for place, mask in enumerate(row["loss_mask"]) if mask]
    assert all(row["trainer_logprobs"][place] < 0 for place in sampled)


@pytest.fixture
def page(run: Run) -> Iterator[Any]:
    """A browser on the run's page; nothing may go wrong in it."""
    sync_api = pytest.importorskip("playwright.sync_api")
    wrong: list[str] = []
    with sync_api.sync_playwright() as playwright, served(run.folder) as view:
        page = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, timeout=180_000).new_page()
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.set_default_timeout(180_000)
        page.goto(view.address)  # there is one run, and its page is the first
        yield page
        assert wrong == []


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; install it with: apt-get install chromium")
def test_a_run_is_looked_into(page: Any) -> None:
    page.click("nav >> text=timeline")
    page.wait_for_selector(".gantt canvas")
    page.click("nav >> text=proof")
    page.wait_for_selector(".checks .good")
    assert page.locator(".checks .bad").count() == 0
    page.click("nav >> text=evaluation")
    page.wait_for_selector("text=pass@k")

    page.goto(f"{re.split('[?#]', page.url)[0]}#/run/run/step/1")
    page.click("table.rollouts a >> nth=0")
    page.click("button:has-text('largest')")
    page.wait_for_selector(".figures b")
    said = page.inner_text(".figures")
    trainer, ratio = (float(found) for found in re.findall(r"(?<!-)(?:trainer|ratio) (-?[\d.]+(?:e-\d+)?)", said))
    assert trainer <= 0
    assert ratio == pytest.approx(1, abs=0.01)  # the first step is strictly on-policy
    assert page.locator(".message.tool").count() > 0
