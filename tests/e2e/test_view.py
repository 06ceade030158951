"""The page over a run of real vLLM: while it goes on, with tools, and after it was killed."""

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo.view.traces import rollout, rollouts_of
from tests.grpo.view.served import served
from transport.traces import trace_path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; install it with: apt-get install chromium"),
]
ROOT = Path(__file__).parents[2]
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], str, Path]]:
    """`grpo configs/zorplex --view`: the process, the page's address and the run's folder."""
    folder = tmp_path_factory.mktemp("view") / "run"
    command = [sys.executable, "-m", "grpo.cli", "configs/zorplex", "--output_dir", str(folder), "--view"]
    command += ["--max_steps", "200", "--orch.eval.num_examples", "8"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip(), folder
        process.send_signal(signal.SIGKILL)


def test_the_trainer_completes_every_trace(run: tuple[subprocess.Popen[str], str, Path]) -> None:
    """A step's trace has the trainer's columns once the version after it is live."""
    _, _, folder = run
    deadline_s = time.monotonic() + 180
    while not trace_path(folder, 5).exists() and time.monotonic() < deadline_s:
        time.sleep(0.2)
    rows = rollouts_of(folder, 2)
    assert len(rows) == 64
    assert all(row["mean_entropy"] is not None for row in rows)
    assert max(abs(row["max_log_ratio"]) for row in rollouts_of(folder, 1)) < 1e-3
    [row] = rollout(folder, 2, rows[0]["rollout"])
    sampled = [place for place, mask in enumerate(row["loss_mask"]) if mask]
    assert all(row["trainer_logprobs"][place] < 0 for place in sampled)


def test_a_run_is_followed_looked_into_and_found_dead(run: tuple[subprocess.Popen[str], str, Path]) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    process, address, folder = run
    wrong: list[str] = []
    with sync_api.sync_playwright() as playwright:
        page = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS).new_page()
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.set_default_timeout(180_000)
        page.goto(address)
        page.click("td a")
        page.wait_for_selector("text=/step [3-9] of 200/")
        page.click("nav >> text=timeline")
        page.wait_for_selector(".gantt canvas")
        page.click("nav >> text=proof")
        page.wait_for_selector(".checks .good")
        assert page.locator(".checks .bad").count() == 0
        page.click("nav >> text=evaluation")
        page.wait_for_selector("text=pass@k")

        base = address.partition("?")[0]
        page.goto(f"{base}#/run/run/step/1")
        page.select_option("select >> nth=0", "log-ratio")
        page.click("table.rollouts a >> nth=0")
        page.click("button:has-text('largest')")
        page.wait_for_selector(".figures b")
        said = page.inner_text(".figures")
        trainer, ratio = (float(found) for found in re.findall(r"(?:trainer|ratio) (-?[\d.]+(?:e-\d+)?)", said))
        assert trainer <= 0
        assert ratio == pytest.approx(1, abs=0.01)  # the first step is strictly on-policy
        assert page.locator(".message.tool").count() > 0
        assert wrong == []

        process.send_signal(signal.SIGKILL)
        process.wait(10)
        page.goto("about:blank")
        wrong.clear()  # the page has lost its server
        with served(folder) as view:
            page.goto(view.address)
            page.wait_for_selector(".state.failed")
            assert wrong == []
