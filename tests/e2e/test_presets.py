"""The presets of the tiny model, real vLLM included, as their user runs them, for fewer steps; one of them with the
page."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from grpo.view.traces import rollout, rollouts_of
from tests.e2e.runs import END_S, PROGRAMS, ROOT, Run, trained
from tests.grpo.view.served import served
from tests.orchestrator.sandbox.conftest import why_no_sandbox

pytestmark = pytest.mark.e2e
NUM_STEPS = 12
MODES = ("success", "wrong_format", "tool_spam", "wrong_answer")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]


def check_that_nothing_is_lost(run: Run, num_steps: int) -> None:
    """All that was asked for is trained, and as it was sampled; and there is something to learn from."""
    summary = run.summary
    assert summary["rollouts_dropped"] == {}
    assert summary["rollouts_trained"] == summary["rollouts_issued"] == num_steps * run.batch_size
    assert summary["steps"] == num_steps
    assert summary["evaluations_failed"] == 0
    assert summary["canary_max_abs"] < 1e-4
    assert summary["mismatch_max_lag0"] < 1e-4
    assert min(line["optim/grad_norm"] for line in run.steps) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Zorplex:
    """A finished run, and what its launcher printed."""

    run: Run
    output: str


@pytest.fixture(scope="module")
def zorplex(tmp_path_factory: pytest.TempPathFactory) -> Zorplex:
    """`grpo configs/zorplex --view`, whose page has answered meanwhile."""
    run = Run(tmp_path_factory.mktemp("zorplex") / "run")
    command = [str(PROGRAMS / "grpo"), "configs/zorplex", "--output_dir", str(run.folder), "--view"]
    command += ["--max_steps", str(NUM_STEPS), "--orch.eval.num_examples", "100"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        address = next(line for line in iter(process.stdout.readline, "") if line.startswith("http://")).strip()
        assert httpx.get(address, follow_redirects=True).status_code == 200
        output, _ = process.communicate(timeout=END_S)
    assert process.returncode == 0, output
    return Zorplex(run=run, output=output)


def test_zorplex_is_learned(zorplex: Zorplex) -> None:
    check_that_nothing_is_lost(zorplex.run, NUM_STEPS)
    summary = zorplex.run.summary
    # The same 100 held-out questions are answered greedily before and after. Where 30 in 100 answers change, the
    # standard error of a gain is √(0.3 / 100) = 0.055.
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.15
    for version in ("0", str(NUM_STEPS)):
        shares = [summary["evaluations"][version][f"eval/measure/{mode}/zorplex"] for mode in MODES]
        assert sum(shares) == pytest.approx(1)
    assert all(mode in zorplex.output for mode in MODES)


def test_the_trainer_completes_every_trace(zorplex: Zorplex) -> None:
    folder = zorplex.run.folder
    rows = rollouts_of(folder, 2)
    assert len(rows) == 64
    assert all(row["mean_entropy"] is not None for row in rows)
    assert max(abs(row["max_log_ratio"]) for row in rollouts_of(folder, 1)) < 1e-3
    [row] = rollout(folder, 2, rows[0]["rollout"])
    sampled = [place for place, mask in enumerate(row["loss_mask"]) if mask]
    assert all(row["trainer_logprobs"][place] < 0 for place in sampled)


@pytest.fixture
def page(zorplex: Zorplex) -> Iterator[Any]:
    """A browser on the run's page; nothing may go wrong in it."""
    sync_api = pytest.importorskip("playwright.sync_api")
    wrong: list[str] = []
    with sync_api.sync_playwright() as playwright, served(zorplex.run.folder) as view:
        page = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS).new_page()
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.set_default_timeout(180_000)
        page.goto(view.address)
        page.click("td a")
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
    page.select_option("select >> nth=0", "log-ratio")
    page.click("table.rollouts a >> nth=0")
    page.click("button:has-text('largest')")
    page.wait_for_selector(".figures b")
    said = page.inner_text(".figures")
    trainer, ratio = (float(found) for found in re.findall(r"(?:trainer|ratio) (-?[\d.]+(?:e-\d+)?)", said))
    assert trainer <= 0
    assert ratio == pytest.approx(1, abs=0.01)  # the first step is strictly on-policy
    assert page.locator(".message.tool").count() > 0


def test_debate_and_critique_are_trained_together(tmp_path: Path) -> None:
    """Each preset's environment with its arguments. The revisions of critiques run in the sandbox."""
    presets = ["debate", *(["critique"] if why_no_sandbox() is None else [])]
    environments = [
        env
        for name in presets
        for env in yaml.safe_load((ROOT / f"configs/{name}/run.yaml").read_text())["orch"]["env"]
    ]
    words = ("--orch.eval.eval_base_model", "false", "--orch.eval.num_examples", "4", "--orch.batch_size", "32")
    words += ("--orch.env", json.dumps(environments), "--max_steps", "2")
    run = trained("configs/debate", tmp_path / "run", *words)
    check_that_nothing_is_lost(run, 2)
    for name in presets:
        assert any(f"reward/mean/{name}" in line for line in run.steps)
