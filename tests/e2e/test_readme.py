"""README.md's commands, run as they stand there."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.readme import NUM_STEPS, README, ROOT, blocks, command, into, run
from tests.infer.server_process import free_port

pytestmark = pytest.mark.e2e


def environment(num_steps: int) -> dict[str, str]:
    """Makes the commands short."""
    short = {"GRPO_ORCH_MAX_STEPS": str(num_steps), "GRPO_ORCH_EVAL__NUM_EXAMPLES": "20"}
    return os.environ | short | {"GRPO_TRAIN_MAX_STEPS": str(num_steps)}


def test_the_one_command_runs(first_run: Path) -> None:
    assert json.loads((first_run / "summary.json").read_text())["steps"] == NUM_STEPS
    folder = first_run.parents[1]
    status = run(command("grpo status outputs/first"), folder, os.environ)
    assert status.returncode == 0, status.stdout + status.stderr
    assert len(re.findall(rf"grpo-(?:orch|train) +finished in step {NUM_STEPS}", status.stdout)) == 2
    ledger = run(command("grpo ledger outputs/first --check"), folder, os.environ)
    assert ledger.returncode == 0, ledger.stdout + ledger.stderr


def test_the_three_programs_started_by_hand_do_the_same(tmp_path: Path) -> None:
    processes, port = {}, free_port()
    variables = environment(3) | {"GRPO_INFER_PORT": str(port)}
    variables["GRPO_ORCH_CLIENT__BASE_URL"] = f'["http://127.0.0.1:{port}/v1"]'
    for name in ("grpo-infer", "grpo-train", "grpo-orch"):
        words = into(command(f"{name} quickstart"), tmp_path)
        with (tmp_path / f"{name}.log").open("wb") as log:
            processes[name] = subprocess.Popen(
                words, cwd=ROOT, env=variables, stdout=log, stderr=log, start_new_session=True
            )
    try:
        assert processes["grpo-orch"].wait(180) == 0, (tmp_path / "grpo-orch.log").read_text()
        assert processes["grpo-train"].wait(90) == 0, (tmp_path / "grpo-train.log").read_text()
        assert processes["grpo-infer"].poll() is None
        processes["grpo-infer"].send_signal(signal.SIGINT)
        assert processes["grpo-infer"].wait(90) == 130
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.kill()
                process.wait(10)
    summary = json.loads((tmp_path / "outputs/by_hand/summary.json").read_text())
    assert summary["versions_served"] == [0, 1, 2, 3]
    assert summary["rollouts_dropped"] == {}


def test_the_dry_run_prints_settings_and_loads_nothing(tmp_path: Path) -> None:
    words = command("grpo quickstart --orch.sampling.temperature 0.8")
    done = run([sys.executable, "-X", "importtime", *words], tmp_path, os.environ)
    assert done.returncode == 0, done.stderr
    assert "temperature: 0.8" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "configs.orch" in imported
    assert not {"torch", "transformers", "vllm"} & imported


def test_the_first_environment_is_learned(tmp_path: Path) -> None:
    (code,) = [block for block in blocks("python") if "class CodeWord" in block]
    (tmp_path / "code_word.py").write_text(code)
    words = command("grpo quickstart --output_dir outputs/code")
    words[words.index("--max_steps") + 1] = "10"
    done = run(words, tmp_path, os.environ, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "outputs/code/summary.json").read_text())
    assert summary["rollouts_trained"] == summary["rollouts_issued"] == 10 * 256
    # In 15 steps it goes from 0.01 to about 0.9; the mean of 256 rewards has a standard error of at most 0.03.
    assert summary["reward_last"] > summary["reward_first"] + 0.3


def test_a_comparison_has_a_table_and_pictures(tmp_path: Path) -> None:
    words = into(command("grpo compare quickstart --arms async"), tmp_path)
    words[words.index("--steps") + 1] = "2"
    folder = tmp_path / "outputs/compared"
    fewer = {"GRPO_ORCH_EVAL__NUM_EXAMPLES": "20"}
    done = run([*words, "--output_dir", str(folder)], tmp_path, os.environ | fewer)
    assert done.returncode == 0, done.stdout + done.stderr
    arms = json.loads((folder / "summary.json").read_text())["arms"]
    assert [arms[name]["mean"]["lag, largest"] for name in ("sync", "async")] == [0, 1]
    assert (folder / "curves.png").exists()
    assert (folder / "gantt.png").exists()


def test_every_path_that_the_readme_names_is_there() -> None:
    named = re.findall(r"\]\(([\w/.]+)\)|`((?:deploy|docs)/[\w/.]*)`", README)
    assert len(named) > 20
    assert [path for pair in named for path in pair if not (ROOT / path).exists()] == []
