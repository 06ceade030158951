"""What a server tells of itself in the run's folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from infer.telling import Telling
from transport.run import found_run


def telling_in(folder: Path, live: list[int]) -> Telling:
    return Telling(output_dir=folder, host="127.0.0.1", port=8001, live=lambda: live)


def said(folder: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((folder / "status" / "infer.127.0.0.1_8001.json").read_text())
    return fields


def test_a_server_loads_serves_and_ends(tmp_path: Path) -> None:
    run, live = found_run(tmp_path / "run"), list[int]()
    telling = telling_in(run.path, live)
    assert list(run.status.iterdir()) == []
    with telling.loading(run.run_id, 3):
        assert said(run.path)["state"] == "loading version 3"
        live.append(3)
    assert (said(run.path)["state"], said(run.path)["step"], said(run.path)["message"]) == ("serving", 3, None)
    telling.ended(None)
    assert said(run.path)["state"] == "finished"


def test_a_version_that_is_refused_is_told_and_the_others_are_served(tmp_path: Path) -> None:
    run = found_run(tmp_path / "run")
    telling = telling_in(run.path, [2])
    with pytest.raises(ValueError, match="corrupt"), telling.loading(run.run_id, 3):
        raise ValueError("corrupt")
    fields = said(run.path)
    assert (fields["state"], fields["step"], fields["message"]) == ("serving", 2, "version 3: corrupt")


def test_an_end_by_an_error_is_told_and_one_by_a_signal_is_an_orderly_one(tmp_path: Path) -> None:
    run = found_run(tmp_path / "run")
    telling = telling_in(run.path, [])
    with telling.loading(run.run_id, 0):
        pass
    telling.ended(SystemExit(143))
    assert said(run.path)["state"] == "finished"
    telling.ended(RuntimeError("the engine is dead"))
    assert (said(run.path)["state"], said(run.path)["message"]) == ("failed", "RuntimeError: the engine is dead")


def test_another_run_or_none_is_told_nothing(tmp_path: Path) -> None:
    run = found_run(tmp_path / "run")
    telling = telling_in(run.path, [])
    with telling.loading("of another run", 0):
        pass
    assert list(run.status.iterdir()) == []
    nowhere = telling_in(tmp_path / "nowhere", [])
    with nowhere.loading("any", 0):
        pass
    nowhere.ended(RuntimeError("nobody to tell"))
    assert not (tmp_path / "nowhere").exists()
