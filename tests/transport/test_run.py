"""Founding and joining a run; status files; identity of the base model."""

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from grpo.transport.errors import DeadlineError, PeerFailed, RunFolderError, StaleRunError, StorageError
from grpo.transport.run import (
    KEY_FILE,
    create_run,
    current_run_id,
    join_run,
    only_one,
    open_run,
    recorded_program,
    recorded_settings,
    wait_for_settings,
)
from grpo.transport.status import PeerWatch, StatusFile, read_status

from tests.chaos.kill_points import start


def test_a_folder_that_holds_a_run_is_refused_and_can_be_overwritten(tmp_path: Path) -> None:
    first = create_run(tmp_path / "run")
    (first.batches / "step_000001").mkdir()
    (first.path / "notes.txt").write_text("mine")
    with pytest.raises(RunFolderError, match=rf"{first.run_id}.*overwrite_output_dir"):
        create_run(first.path)
    second = create_run(first.path, overwrite=True)
    assert second.run_id != first.run_id
    assert current_run_id(second.path) == second.run_id
    assert list(second.batches.iterdir()) == []
    assert (second.path / "notes.txt").read_text() == "mine"
    (second.path / "run.json").unlink()
    (second.broadcasts / "something").mkdir()
    with pytest.raises(RunFolderError, match="broadcasts but no run"):
        create_run(second.path, overwrite=True)


def found(path: Path, at: int) -> None:
    """A founder that ends before what it does to files in `path` for the n-th time."""
    left = [at]

    def ends(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("open", "os.mkdir", "os.remove", "os.rmdir", "os.rename") and str(path) in str(arguments[0]):
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)

    sys.addaudithook(ends)
    create_run(path, overwrite=True)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_founder_that_is_killed_at_any_moment_is_followed_by_the_same_command(
    tmp_path: Path, overwrite: bool
) -> None:
    for at in range(1, 100):
        path = tmp_path / str(at)
        if overwrite:
            earlier = create_run(path)
            (earlier.broadcasts / "step_000001").mkdir()
            (path / "metrics.jsonl").write_text("")
        _, status = os.waitpid(start(partial(found, path, at)), 0)
        run = open_run(path, resume="auto", overwrite=overwrite)
        assert list(run.broadcasts.iterdir()) == []
        assert run.key("NO_SUCH_KEY").token
        if status == 0:
            return
        assert os.waitstatus_to_exitcode(status) == 9
    pytest.fail("the founder has more than 100 moments")


def test_a_run_that_an_orchestrator_works_in_is_not_removed(tmp_path: Path) -> None:
    run = create_run(tmp_path)
    with only_one(tmp_path, "orch"), pytest.raises(RunFolderError, match="grpo-orch is at work"):
        open_run(tmp_path, resume="auto", overwrite=True)
    assert current_run_id(tmp_path) == run.run_id


def test_a_program_that_is_started_again_takes_its_place_and_what_has_changed_is_recorded(tmp_path: Path) -> None:
    run = create_run(tmp_path)
    assert recorded_settings(tmp_path, "train") is None
    first = {"settings": {"a": 1, "b": 2}, "base_model": "m"}
    assert join_run(tmp_path, role="train", record=first, timeout_s=1) == run
    (run.broadcasts / "step_000007").mkdir()
    before = list[Any]()

    def compare(earlier: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
        before.append(earlier["settings"])
        return [("b", 2, 5)]

    join_run(tmp_path, role="train", record={"settings": {"a": 1, "b": 5}}, compare=compare, timeout_s=1)
    program = recorded_program(tmp_path, "train")
    assert (before, program["settings"], program["base_model"]) == ([first["settings"]], {"a": 1, "b": 5}, "m")
    assert [(one["key"], one["before"], one["now"], one["step"]) for one in program["changes"]] == [("b", 2, 5, 7)]
    assert "numpy" in program["versions"]
    with pytest.raises(ZeroDivisionError):
        join_run(tmp_path, role="train", record={"settings": {}}, compare=lambda _: [1 // 0], timeout_s=1)  # type: ignore[list-item]
    assert recorded_settings(tmp_path, "train") == {"a": 1, "b": 5}


def test_a_second_program_of_a_role_is_refused_as_long_as_the_first_lives(tmp_path: Path) -> None:
    code = "import sys, time; from grpo.transport.run import only_one\nwith only_one(sys.argv[1], 'train'):\n"
    code += "    print('in', flush=True); time.sleep(60)"
    first = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "in\n"
        with pytest.raises(RunFolderError, match="grpo-train"), only_one(tmp_path, "train"):
            pass
        with only_one(tmp_path, "orch"):
            pass
    finally:
        first.kill()
        first.communicate()
    with only_one(tmp_path, "train"):
        pass


def test_the_settings_of_a_program_are_there_once_it_has_joined_and_is_at_work(tmp_path: Path) -> None:
    create_run(tmp_path)
    join_run(tmp_path, role="train", record={"settings": {"a": 1}}, timeout_s=1)
    with pytest.raises(DeadlineError, match="grpo-train"):
        wait_for_settings(tmp_path, "train", timeout_s=0.1)
    with only_one(tmp_path, "train"):
        assert wait_for_settings(tmp_path, "train", timeout_s=1) == {"a": 1}
        said = json.loads((tmp_path / "run.json").read_text())
        said["programs"]["train"]["started"] = 1  # another process has its number now
        (tmp_path / "run.json").write_text(json.dumps(said))
        with pytest.raises(DeadlineError, match="grpo-train"):
            wait_for_settings(tmp_path, "train", timeout_s=0.1)


def test_a_run_that_is_not_there_or_another_one_is_not_joined(tmp_path: Path) -> None:
    with pytest.raises(DeadlineError, match="grpo-train"):
        join_run(tmp_path, role="orch", record={}, timeout_s=0.1)
    run = create_run(tmp_path)
    with pytest.raises(StaleRunError, match=run.run_id):
        join_run(tmp_path, role="train", record={}, run_id="other", timeout_s=1)


def test_a_run_is_made_with_a_key_that_only_its_owner_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = create_run(tmp_path / "run")
    for name in (KEY_FILE, "run.json"):  # settings may hold keys of endpoints
        assert stat.S_IMODE((run.path / name).stat().st_mode) == 0o600
    tokens = [one.key("A_KEY").token for one in (run, run, create_run(tmp_path / "other"))]
    monkeypatch.setenv("A_KEY", "a secret of enough characters")
    tokens.append(run.key("A_KEY").token)
    assert (len(set(tokens)), tokens[0]) == (3, tokens[1])
    monkeypatch.delenv("A_KEY")
    (run.path / KEY_FILE).unlink()
    with pytest.raises(RunFolderError, match="A_KEY"):
        run.key("A_KEY")


def test_a_lock_that_a_stopped_program_holds_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create_run(tmp_path)
    monkeypatch.setattr("grpo.transport.run.LOCK_TIMEOUT_S", 0.1)
    with run.locked():
        for change in (lambda: create_run(tmp_path), lambda: join_run(tmp_path, role="orch", record={}, timeout_s=1)):
            with pytest.raises(RunFolderError, match=r"\.run\.lock"):
                change()


def test_links_in_a_run_that_is_overwritten_are_not_followed_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, elsewhere = create_run(tmp_path / "run"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("")
    run.checkpoints.symlink_to(elsewhere)
    (run.path / "ledger.sqlite").symlink_to(elsewhere / "kept")
    again = create_run(run.path, overwrite=True)
    assert not again.checkpoints.is_symlink()
    assert not (run.path / "ledger.sqlite").exists()
    assert (elsewhere / "kept").exists()
    assert str(elsewhere) in caplog.text


@pytest.mark.parametrize("output_dir", ["/".join(["d"] * 3000), "/dev/null/run"])
def test_an_output_dir_that_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output_dir: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunFolderError):
        create_run(output_dir)
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"schema_version": 99, "run_id": "a"}', '{"schema_version": 2, "run_id": 3}']
)
def test_a_damaged_run_file_is_refused(tmp_path: Path, content: str) -> None:
    create_run(tmp_path)
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(RunFolderError):
        current_run_id(tmp_path)


def test_a_peer_that_failed_or_is_gone_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeerWatch, "interval_s", 0.0)
    monkeypatch.setattr(PeerWatch, "grace_s", 0.1)
    path, peer = tmp_path / "orch.json", PeerWatch(tmp_path / "orch.json", name="grpo-orch")
    peer.check()
    StatusFile(path).set("sampling", step=3)
    peer.check()
    StatusFile(path).failed(ValueError("no such column"))
    with pytest.raises(PeerFailed, match="grpo-orch"):
        peer.check()
    child = subprocess.Popen(["true"])
    child.wait()
    fields = read_status(path)
    assert fields is not None
    path.write_text(json.dumps(fields | {"state": "sampling", "step": 3, "pid": child.pid}))
    peer.check()
    time.sleep(0.15)
    with pytest.raises(PeerFailed, match=rf"grpo-orch.*{child.pid}.*step 3"):
        peer.check()
    path.write_text(json.dumps(fields | {"state": "finished", "pid": child.pid}))
    peer.check()
    path.write_text(json.dumps(fields | {"state": "sampling", "started": 1}))  # another process has its number now
    peer.check()
    time.sleep(0.15)
    with pytest.raises(PeerFailed, match="is gone"):
        peer.check()


def test_a_folder_that_is_removed_meanwhile_is_an_error_of_the_storage_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="status"):
        StatusFile(tmp_path / "status" / "train.json").set("waiting")
