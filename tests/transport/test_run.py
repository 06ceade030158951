"""Founding and joining a run; status files; identity of the base model."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from transport.errors import DeadlineError, PeerFailed, RunFolderError, StaleRunError
from transport.run import current_run_id, found_run, join_run, only_one, recorded_settings, wait_for_settings
from transport.status import PeerWatch, StatusFile, read_status
from transport.weights.identity import base_identity, resolve_model


def test_a_folder_that_holds_a_run_is_refused_and_can_be_overwritten(tmp_path: Path) -> None:
    first = found_run(tmp_path / "run")
    (first.batches / "step_000001").mkdir()
    (first.path / "notes.txt").write_text("mine")
    with pytest.raises(RunFolderError, match=rf"holds the run {first.run_id} .*overwrite_output_dir: true"):
        found_run(first.path)
    second = found_run(first.path, overwrite=True)
    assert second.run_id != first.run_id
    assert current_run_id(second.path) == second.run_id
    assert list(second.batches.iterdir()) == []
    assert (second.path / "notes.txt").read_text() == "mine"


def test_a_folder_with_broadcasts_but_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broadcasts").mkdir()
    with pytest.raises(RunFolderError, match=r"holds broadcasts but no run.json"):
        found_run(tmp_path, overwrite=True)


@pytest.mark.parametrize("leftover", ["logs", "status"])
def test_a_folder_with_anything_of_a_run_is_refused(tmp_path: Path, leftover: str) -> None:
    (tmp_path / leftover).mkdir()
    with pytest.raises(RunFolderError, match=f"holds {leftover} but no run"):
        found_run(tmp_path)


def test_a_path_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"cannot be a run.s folder: .*Not a directory.*give another output_dir"):
        found_run(tmp_path / "file" / "run")


def test_joining_records_settings_once_a_role(tmp_path: Path) -> None:
    run = found_run(tmp_path)
    joined = join_run(tmp_path, role="orch", settings={"a": 1}, timeout_s=1)
    assert joined == run
    fields = json.loads((tmp_path / "run.json").read_text())
    assert fields["programs"]["orch"]["settings"] == {"a": 1}
    assert "numpy" in fields["programs"]["orch"]["versions"]
    with pytest.raises(DeadlineError, match="has a orch already"):
        join_run(tmp_path, role="orch", settings={}, timeout_s=0.1)


def test_a_program_that_resumes_joins_again_in_the_place_of_the_earlier_one(tmp_path: Path) -> None:
    run = found_run(tmp_path)
    assert recorded_settings(tmp_path, "train") is None
    join_run(tmp_path, role="train", settings={"a": 1}, timeout_s=1)
    assert join_run(tmp_path, role="train", settings={"a": 2}, again=True, timeout_s=1) == run
    assert recorded_settings(tmp_path, "train") == {"a": 2}


def test_a_second_program_of_a_role_is_refused_as_long_as_the_first_lives(tmp_path: Path) -> None:
    code = "import sys, time; from transport.run import only_one\nwith only_one(sys.argv[1], 'train'):\n"
    code += "    print('in', flush=True); time.sleep(60)"
    first = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "in\n"
        with (
            pytest.raises(RunFolderError, match=r"another grpo-train is at work in .*; end it first"),
            only_one(tmp_path, "train"),
        ):
            pass
        with only_one(tmp_path, "orch"):
            pass
    finally:
        first.kill()
        first.communicate()
    with only_one(tmp_path, "train"):
        pass


def test_an_orchestrator_does_not_join_the_run_that_an_earlier_one_left(tmp_path: Path) -> None:
    old = found_run(tmp_path)
    join_run(tmp_path, role="orch", settings={}, timeout_s=1)
    timer = threading.Timer(0.2, lambda: found_run(tmp_path, overwrite=True))
    timer.start()
    assert join_run(tmp_path, role="orch", settings={}, timeout_s=60).run_id != old.run_id
    timer.join()


def test_joining_without_a_founder_says_what_to_start(tmp_path: Path) -> None:
    with pytest.raises(DeadlineError, match="there is none; start grpo-train with the same output_dir"):
        join_run(tmp_path, role="orch", settings={}, timeout_s=0.1)


def test_the_settings_of_a_program_are_there_once_it_has_joined(tmp_path: Path) -> None:
    run = found_run(tmp_path)
    with pytest.raises(DeadlineError, match=rf"waited 0\.1 s for grpo-train to join run {run.run_id}"):
        wait_for_settings(run, "train", timeout_s=0.1)
    join = threading.Timer(0.2, lambda: join_run(tmp_path, role="train", settings={"a": 1}, timeout_s=1))
    join.start()
    assert wait_for_settings(run, "train", timeout_s=60) == {"a": 1}
    join.join()


def test_joining_a_run_of_another_id_is_refused(tmp_path: Path) -> None:
    run = found_run(tmp_path)
    with pytest.raises(StaleRunError, match=rf"holds run {run.run_id}, expected run_id other"):
        join_run(tmp_path, role="train", settings={}, run_id="other", timeout_s=1)


def test_a_status_file_says_who_waits_for_whom(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    assert read_status(path) is None
    StatusFile(path).set("waiting", step=3, waiting_for="orchestrator: batch 3")
    status = read_status(path)
    assert status is not None
    assert (status["state"], status["step"], status["waiting_for"]) == ("waiting", 3, "orchestrator: batch 3")


def test_a_peer_that_failed_or_is_gone_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeerWatch, "interval_s", 0.0)
    monkeypatch.setattr(PeerWatch, "grace_s", 0.1)
    path, peer = tmp_path / "orch.json", PeerWatch(tmp_path / "orch.json", name="grpo-orch")
    peer.check()
    StatusFile(path).set("sampling", step=3)
    peer.check()
    StatusFile(path).failed(ValueError("no such column"))
    with pytest.raises(PeerFailed, match="grpo-orch has failed: ValueError: no such column"):
        peer.check()
    child = subprocess.Popen(["true"])
    child.wait()
    fields = read_status(path)
    assert fields is not None
    path.write_text(json.dumps(fields | {"state": "sampling", "step": 3, "pid": child.pid}))
    peer.check()
    time.sleep(0.15)
    with pytest.raises(PeerFailed, match=rf"grpo-orch \(pid {child.pid}\) is gone .* it was sampling in step 3"):
        peer.check()
    path.write_text(json.dumps(fields | {"state": "finished", "pid": child.pid}))
    peer.check()


def test_the_identity_of_a_base_model_follows_configuration_and_weights(tmp_path: Path) -> None:
    def make(name: str, config: dict[str, object], weights: bytes) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes(weights)
        return base_identity(resolve_model(str(folder)))

    same = make("a", {"hidden_size": 8, "torch_dtype": "float32"}, b"0" * 9)
    assert same == make("b", {"torch_dtype": "bfloat16", "hidden_size": 8}, b"0" * 9)
    assert same != make("c", {"hidden_size": 9}, b"0" * 9)
    assert same != make("d", {"hidden_size": 8}, b"0" * 8 + b"1")


def test_a_missing_model_says_where_was_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match=r"no such folder \(looked for .*/none\)"):
        resolve_model(str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError, match=r"the folder has no config\.json"):
        resolve_model(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="HF_HUB_OFFLINE=1 forbids fetching it"):
        resolve_model("nobody/nothing")
