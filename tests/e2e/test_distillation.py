"""Learning from a teacher token by token, real vLLM included: more right answers without any reward, though the
teacher's server, which `grpo` starts, is killed on the way."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from configs.auxiliary import TeacherSettings
from orchestrator.teacher.served import ServedTeacher
from tests.e2e.plain_server import KEY, Live
from tests.e2e.test_pipeline import ROOT, metrics
from transport.status import read_status

pytestmark = pytest.mark.e2e

EXACT = 1e-4


def summary_of(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


def per_step(run: Path, metric: str) -> list[float]:
    return [line[metric] for line in metrics(run) if "loss/policy" in line]


# --- a better model ---


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the preset, whose teacher was killed after its first steps."""
    folder = tmp_path_factory.mktemp("distilled") / "run"
    command = [sys.executable, "-m", "grpo.cli", "configs/distillation", "--output_dir", str(folder)]
    command += ["--max_steps", "16", "--orch.eval.num_examples", "100"]
    launcher = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline_s = time.monotonic() + 240
        while not (folder / "metrics.jsonl").exists() or len(metrics(folder)) < 3:
            assert time.monotonic() < deadline_s, "the run did not get going within 240 s"
            assert launcher.poll() is None, launcher.communicate()[1]
            time.sleep(0.05)
        os.kill((read_status(folder / "status" / "teacher.json") or {})["pid"], signal.SIGKILL)
        _, errors = launcher.communicate(timeout=280)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, errors
    return folder


def test_the_divergence_from_the_teacher_falls_by_half_or_more(distilled: Path) -> None:
    divergences = per_step(distilled, "policy/teacher_kl")
    assert divergences[0] > 1  # 1.5 nats a token
    assert statistics.mean(divergences[-3:]) < 0.5 * statistics.mean(divergences[:3])


def test_the_student_learns_what_it_could_not_do_without_a_single_reward(distilled: Path) -> None:
    """From 0.32 to 0.97 of 200 held-out words; the standard error of such a share is at most √(0.25 / 200) = 0.035."""
    summary = summary_of(distilled)
    assert 0.25 <= summary["accuracy_before"] <= 0.5
    assert summary["accuracy_after"] >= 0.8
    assert set(per_step(distilled, "reward/mean")) == {0.0}


def test_a_teacher_that_is_killed_is_started_again_and_leaves_the_run_alone(distilled: Path) -> None:
    settings = yaml.safe_load((distilled / "settings" / "teacher.yaml").read_text())
    assert settings["enable_lora"] is False
    assert settings["output_dir"] != str(distilled)
    assert not Path(settings["output_dir"]).exists()
    assert (distilled / "logs" / "teacher.log").read_text().count("serving on 127.0.0.1") == 2
    assert (read_status(distilled / "status" / "teacher.json") or {})["state"] == "finished"
    assert len(list((distilled / "status").glob("infer.*.json"))) == 1


def test_no_rollout_is_lost_and_what_is_trained_is_what_was_sampled(distilled: Path) -> None:
    summary = summary_of(distilled)
    assert summary["rollouts_dropped"] == {}
    assert sum(per_step(distilled, "teacher/failed")) == 0
    assert sum(per_step(distilled, "teacher/rows")) >= summary["rollouts_trained"]
    assert summary["mismatch_max_lag0"] < EXACT


# --- somebody else's server ---


async def test_openais_routes_of_a_real_vllm_score_as_ours_do(plain: Live) -> None:
    # The base's name in vLLM; asked as our kind, the teacher would be its newest policy.
    [base] = [one["id"] for one in plain.server.get("/v1/models").json()["data"] if one["parent"] is None]
    settings = TeacherSettings.model_validate(
        {"model": {"name": base}, "client": {"base_url": [f"{plain.server.url}/v1"]}}
    )
    rows = [np.frombuffer(text, np.uint8).astype(np.int32) for text in (b"Reverse: hello", b"Reverse: word", b"a b")]
    found = []
    for ours in (False, True):
        teacher = ServedTeacher(settings, api_key=KEY, seq_len=512, ours=ours)
        try:
            found.append([await teacher.score(row, 1.0) for row in rows])
        finally:
            await teacher.close()
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=EXACT)
