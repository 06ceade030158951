"""`python -m deploy.memory`: what it prints, and when it ends with an error."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.memory.__main__ import main
from tests.tiny_models import QUICKSTART_MODEL

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/memory.md"


def written(folder: Path, name: str, **values: Any) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"model": str(QUICKSTART_MODEL)} | values))
    return str(path)


def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    monkeypatch.setattr("sys.argv", ["deploy.memory", *arguments])
    main()
    return capsys.readouterr().out.splitlines()


def test_the_last_line_has_the_need_and_the_servers_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = "--train", written(tmp_path, "train"), "--infer", written(tmp_path, "infer")
    *table, last = told(monkeypatch, capsys, *files, "--device-gib", "24")
    figures = json.loads(last)
    assert figures["measured"] is None
    assert 0.7 < figures["gpu_memory_utilization"] < 0.85
    assert figures["need"] > figures["estimate"]["fixed"] > 0
    assert "server: gpu_memory_utilization" in table[-1]


def test_on_a_cpu_nothing_is_divided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = "--train", written(tmp_path, "train", device="cpu"), "--infer", written(tmp_path, "infer")
    *table, last = told(monkeypatch, capsys, *files)
    assert json.loads(last)["gpu_memory_utilization"] is None
    assert "base weights saved by sharing" in table[-1]


@pytest.mark.parametrize(
    ("train", "expected", "status"),
    [
        ({"lora": False, "weight_broadcast": {"format": "full"}}, "error: lora is false", 1),
        ({"sequence_len": 10_000_000}, "error: of 24.0 GiB free device memory", 1),
        ({"model": "nowhere/at/all"}, "error: model 'nowhere/at/all': no such folder", 1),
        ({"lora_rnak": 3}, "did you mean lora_rank?", 2),
        ({"device": "cpu"}, "error: --device-gib is for a GPU, and device is cpu", 1),
    ],
)
def test_what_cannot_be_estimated_ends_with_the_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    train: dict[str, Any],
    expected: str,
    status: int,
) -> None:
    files = "--train", written(tmp_path, "train", **train), "--infer", written(tmp_path, "infer")
    with pytest.raises(SystemExit) as ended:
        told(monkeypatch, capsys, *files, "--device-gib", "24")
    assert ended.value.code == status
    assert expected in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit):
        told(monkeypatch, capsys, "--train", written(tmp_path, "train"), "--device-gib", "24", "--measure")
    assert "error: --measure needs the GPU itself" in capsys.readouterr().err


def test_the_commands_of_the_page_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    prefix = "python -m deploy.memory "
    commands = [line.strip() for line in PAGE.read_text().splitlines() if line.strip().startswith(prefix)]
    assert len(commands) >= 2
    for command in commands:
        # The dry step has its own test.
        arguments = [word for word in shlex.split(command.removeprefix(prefix)) if word != "--measure"]
        assert told(monkeypatch, capsys, *arguments)
