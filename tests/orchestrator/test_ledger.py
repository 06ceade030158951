"""The ledger: every rollout has one fate."""

import sqlite3
from pathlib import Path

import pytest

from orchestrator.ledger import Ledger


def rows(path: Path) -> list[tuple[object, ...]]:
    with sqlite3.connect(path) as database:
        return database.execute("SELECT id, state, reason, step, reward FROM rollouts ORDER BY id").fetchall()


def test_the_fate_of_every_rollout_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    ledger.issued(0, num=3, env="e", example=5, version=2)
    ledger.flush()
    assert [row[1] for row in rows(path)] == ["issued"] * 3
    ledger.dropped(["0/1"], "env_error")
    for rollout in ("0/0", "0/2"):
        ledger.scored(rollout, reward=0.5, num_tokens=7)
    ledger.shipped(["0/0", "0/2"], 3)
    ledger.trained(3)
    ledger.close()
    assert rows(path) == [
        ("0/0", "trained", None, 3, 0.5),
        ("0/1", "dropped", "env_error", None, None),
        ("0/2", "trained", None, 3, 0.5),
    ]
    assert (ledger.num_issued, ledger.num_trained, dict(ledger.num_dropped)) == (3, 2, {"env_error": 1})


def test_a_rollout_ships_only_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.issued(0, num=1, env="e", example=0, version=0)
    ledger.shipped(["0/0"], 1)
    with pytest.raises(KeyError):
        ledger.shipped(["0/0"], 2)
    ledger.close()


def test_it_survives_its_process_being_killed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    ledger.issued(0, num=2, env="e", example=0, version=0)
    ledger.flush()
    # A second connection reads while the first is still open, as after a kill.
    assert len(rows(path)) == 2
    ledger.close()
