"""The `grpo` command finds the program that answers."""

import subprocess
import sys
from pathlib import Path

import pytest

from deploy.cli import COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command: str) -> None:
    program = Path(sys.executable).with_name("grpo")
    done = subprocess.run([program, command, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"usage: grpo {command}")
    assert "exit codes: 0 " in done.stdout


def test_the_general_help_names_each_command() -> None:
    program = Path(sys.executable).with_name("grpo")
    done = subprocess.run([program, "--help"], capture_output=True, text=True, check=True)
    assert all(f"  grpo {command} " in done.stdout for command in COMMANDS)
