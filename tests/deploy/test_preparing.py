"""What is done before the programs are started can be ended like a run."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from grpo.transport.run import only_one

from tests.support import until

ON_A_GPU = """
import sys
from grpo.deploy import launcher
from grpo.deploy.memory import with_split
from grpo.cli import main

launcher._divided = lambda plan, model: with_split(plan, model)[0]
sys.argv = ["grpo", "configs/quickstart", "--colocate", "--output_dir", sys.argv[1]]
main()
"""


def dry_step_of(launcher: int) -> psutil.Process:
    def found() -> psutil.Process | None:
        for process in psutil.Process(launcher).children():
            with suppress(psutil.Error):
                if "grpo.trainer.dry_step" in process.cmdline():
                    return process
        return None

    step = until(found)
    assert step is not None
    return step


def test_a_signal_ends_the_dry_step_and_the_launcher(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ON_A_GPU, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        dry_step = dry_step_of(launcher.pid)
        launcher.send_signal(signal.SIGINT)
        _, errors = launcher.communicate(timeout=120)
    assert launcher.returncode == 130, errors
    _, alive = psutil.wait_procs([dry_step], timeout=120)  # one that was just being started ends by itself
    assert alive == []
    with only_one(tmp_path / "run", "launcher"):
        assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize(
    ("begins", "program"),
    [("grpo.cli", "from grpo.deploy import launcher; launcher.run_plan"), ("grpo.trainer.cli", "cli._run")],
)
def test_no_key_is_seen_in_the_environment_of_a_process(tmp_path: Path, begins: str, program: str) -> None:
    code = f"import sys; from pathlib import Path; import {begins} as cli; {program} = "
    code += "lambda *_, **__: print(b'a-secret' in Path('/proc/self/environ').read_bytes()); cli.main()"
    command = [sys.executable, "-c", code, "quickstart", "--output_dir", str(tmp_path / "run")]
    environment = os.environ | {"VLLM_API_KEY": "a-secret", "WANDB_API_KEY": "a-secret"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout == "False\n", done.stderr
