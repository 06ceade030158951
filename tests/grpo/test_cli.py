"""The `grpo` command finds who answers, and ends well where nobody reads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from grpo.transport.errors import UserError
from grpo.transport.run import create_run

from grpo.cli import COMMANDS, main
from tests.grpo.run_folder import grpo

MODEL = Path(__file__).parents[2] / "configs/quickstart/model"


@pytest.mark.parametrize("command", ["run", *COMMANDS])
def test_each_command_explains_itself(command: str) -> None:
    done = grpo(command, "--help")
    assert done.returncode == 0
    assert COMMANDS.get(command, "usage")[1:] in " ".join(done.stdout.split())


def test_run_need_not_be_said() -> None:
    words = ("configs/quickstart", "--max_steps", "7", "--dry-run")
    assert grpo("run", *words).stdout == grpo(*words).stdout != ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("statsu", "outputs"), "did you mean status?"),
        (("train", "quickstart"), "no command 'train'"),
        (("my_env.py",), "--env FILE:CLASS"),
        (("evaluate", "quickstart"), "quickstart/model"),
        (("view", ".", "--port", "99999"), "from 0 to 65535"),
        (("view", ".", "--port", "-3"), "from 0 to 65535"),
        (("compare", "quickstart", "--arm", "a:", "--seeds", "a,b"), "as in 1,2,3"),
        (("ledger", ".", "--step", "x"), "expected a number"),
        (("sft", "--epochs", "0"), "from 1 on"),
    ],
)
def test_what_is_no_command_or_no_number_is_answered_with_what_is(
    words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["grpo", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("words", "code"), [((), 2), (("help",), 0), (("help", "status"), 0)])
def test_help_is_told(
    words: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["grpo", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code or 0) == code
    assert "usage:" in "".join(capsys.readouterr())


def test_a_mistake_is_told_in_a_line_and_a_fault_of_ours_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(options: object) -> int:
        raise error

    monkeypatch.setattr("grpo.commands.status.main", fails)
    monkeypatch.setattr("sys.argv", ["grpo", "status", "outputs"])
    error: Exception = UserError("no such thing")
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err) == (2, "error: no such thing\n")
    error = ValueError("not enough values to unpack")
    with pytest.raises(ValueError, match="unpack"):
        main()


@pytest.mark.parametrize(
    "words",
    [
        ("data", "codes.csv", "--reward", "{"),
        ("data", "codes.csv", "--prompt", "a", "--model", "model"),
        ("evaluate", str(MODEL), "--env", "{id: ["),
        ("sft", "codes.csv", "--prompt", "a", "--answer", "b", "--model", "model"),
    ],
)
def test_what_people_mistype_is_told_without_a_traceback(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "codes.csv").write_text("a,b\nc,d\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert grpo(*words).returncode == 2


def test_a_command_whose_output_nobody_reads_ends_without_a_word(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("grpo")
    create_run(tmp_path / "run")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([program, "status", tmp_path / "run"], stdout=writer, stderr=subprocess.PIPE, timeout=120)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
