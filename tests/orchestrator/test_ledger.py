"""The ledger: every rollout has one fate, which outlives the process."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from grpo.orchestrator.ledger import NUM_STATES, Ledger
from grpo.transport.errors import StorageError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    with closing(Ledger(path)) as ledger:
        yield ledger


def rows(path: Path) -> list[tuple[object, ...]]:
    with sqlite3.connect(path) as database:
        return database.execute("SELECT id, state, reason, step, reward FROM rollouts ORDER BY id").fetchall()


def issue(ledger: Ledger, num: int = 1, *, group: int = 0) -> None:
    ledger.issued(group, num=num, env="e", example=group, version=0)


def ship(ledger: Ledger, step: int, *rollout_ids: str) -> None:
    ledger.shipping(rollout_ids, step, state={"after": step}, metrics={"reward/mean": 0.5})()
    ledger.shipped(step)


def test_the_fate_of_every_rollout_is_kept(path: Path, ledger: Ledger) -> None:
    ledger.issued(0, num=3, env="e", example=5, version=2)
    ledger.changes()()
    assert [row[1] for row in rows(path)] == ["issued"] * 3
    ledger.dropped(["0/1"], "env_error")
    for rollout in ("0/0", "0/2"):
        ledger.scored(rollout, reward=0.5, num_tokens=7)
    ship(ledger, 3, "0/0", "0/2")
    ledger.trained(3)
    ledger.changes()()
    with pytest.raises(KeyError):
        ship(ledger, 4, "0/0")  # a second time
    ledger.drop_unfinished("run_ended")  # nothing is
    assert rows(path) == [
        ("0/0", "trained", None, 3, 0.5),
        ("0/1", "dropped", "env_error", None, None),
        ("0/2", "trained", None, 3, 0.5),
    ]
    assert (ledger.num_issued, ledger.num_trained, dict(ledger.num_dropped)) == (3, 2, {"env_error": 1})


def test_a_trainer_may_be_quicker_than_the_word_that_its_batch_has_left(path: Path, ledger: Ledger) -> None:
    issue(ledger)
    ledger.shipping(["0/0"], 1, state={}, metrics={})()
    ledger.trained(1)
    ledger.shipped(1)
    ledger.changes()()
    assert rows(path)[0][1] == "trained"
    assert ledger.num_trained == 1


def test_what_is_needed_to_go_on_is_there_before_the_batch_leaves(path: Path, ledger: Ledger) -> None:
    issue(ledger, 2)
    commit = ledger.shipping(["0/0", "0/1"], 1, state={"open": ["x"]}, metrics={"reward/mean": 0.25})
    assert rows(path) == []
    commit()
    assert [row[1:4] for row in rows(path)] == [("shipping", None, 1)] * 2
    assert (ledger.state_after(1), ledger.metrics()) == ({"open": ["x"]}, {1: {"reward/mean": 0.25}})
    assert ledger.state_after(2) is None


def test_the_state_of_a_batch_is_durable_also_where_another_thread_comes_to_write_it(ledger: Ledger) -> None:
    said = list[str]()
    ledger._database.set_trace_callback(said.append)
    issue(ledger)
    commit = ledger.shipping(["0/0"], 1, state={}, metrics={})
    ledger.changes()()  # as for groups that begin meanwhile
    commit()
    written = next(place for place, statement in enumerate(said) if "INTO steps" in statement)
    assert [one for one in said[:written] if "synchronous" in one][-1].endswith("FULL")


def test_changes_are_written_in_their_order_whoever_writes_them_first(path: Path, ledger: Ledger) -> None:
    issue(ledger)
    first = ledger.changes()
    ledger.dropped(["0/0"], "env_error")
    second = ledger.changes()
    second()
    first()
    assert rows(path)[0][1:3] == ("dropped", "env_error")


def test_what_is_told_while_a_write_goes_on_is_written_by_the_next(path: Path, ledger: Ledger) -> None:
    def told_meanwhile(statement: str) -> None:
        if "INTO rollouts" in statement and ledger.num_issued == 1:
            issue(ledger, group=1)
            ledger.changes()

    ledger._database.set_trace_callback(told_meanwhile)
    issue(ledger)
    ledger.changes()()
    ledger.changes()()
    assert [row[0] for row in rows(path)] == ["0/0", "1/0"]


def test_states_are_kept_of_the_newest_batches_and_of_checkpoints(ledger: Ledger) -> None:
    for step in range(1, NUM_STATES + 11):
        ship(ledger, step)
    ledger.forget([4, 8])
    assert [step for step in range(1, 14) if ledger.state_after(step) is not None] == [4, 8, 9, 10, 11, 12, 13]
    assert len(ledger.metrics()) == NUM_STATES


@pytest.fixture
def killed(path: Path, ledger: Ledger) -> Iterator[Ledger]:
    """After a process that was killed: batch 1 trained, 2 shipped, 3 about to be, a group scored, one asked."""
    for group in range(5):
        issue(ledger, group=group)
    for group in range(4):
        ledger.scored(f"{group}/0", reward=1.0, num_tokens=3)
    ship(ledger, 1, "0/0")
    ship(ledger, 2, "1/0")
    ledger.trained(1)
    ledger.shipping(["2/0"], 3, state={"after": 3}, metrics={})()
    with closing(Ledger(path)) as next_one:
        yield next_one


@pytest.mark.parametrize("sent", [False, True])
def test_a_process_that_goes_on_keeps_what_the_channel_has_and_drops_the_rest(
    path: Path, killed: Ledger, sent: bool
) -> None:
    assert killed.resume(3 if sent else 2) == 5
    third = ("shipped", None, 3) if sent else ("dropped", "restarted", None)
    assert [row[1:4] for row in rows(path)] == [
        ("trained", None, 1),
        ("shipped", None, 2),
        third,
        ("dropped", "restarted", None),
        ("dropped", "restarted", None),
    ]
    assert (killed.num_issued, killed.num_trained) == (5, 1)
    assert dict(killed.num_dropped) == {"restarted": 2 if sent else 3}
    assert (killed.state_after(3) is not None) == sent
    killed.trained(3)  # which says that those before are, too
    assert killed.num_trained == (3 if sent else 2)
    killed.changes()()
    assert [row[1] for row in rows(path)[:3]] == ["trained", "trained", "trained" if sent else "dropped"]


@pytest.mark.parametrize(
    ("step", "pools"), [(3, {"a": "normal", "b": "hard"}), (2, {"a": "easy", "b": "hard"}), (1, {"a": "easy"})]
)
def test_a_run_that_goes_back_finds_its_old_pools(path: Path, killed: Ledger, step: int, pools: dict[str, str]) -> None:
    for number, moved in enumerate(({"a": "easy"}, {"b": "hard"}, {"a": "normal"}), start=1):
        killed.examples_moved(moved, number)
    killed.changes()()
    with closing(Ledger(path)) as again:
        again.resume(step)
        assert again.pools() == pools


def test_a_file_that_is_no_ledger_is_named(tmp_path: Path) -> None:
    (tmp_path / "other.sqlite").write_bytes(b"something else" * 100)
    with pytest.raises(StorageError, match=r"other\.sqlite"):
        Ledger(tmp_path / "other.sqlite")


def test_what_could_not_be_written_is_kept_for_the_next_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo.orchestrator.ledger.BUSY_S", 0.1)
    ledger = Ledger(path)
    issue(ledger, 2)
    with sqlite3.connect(path) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageError, match=r"ledger\.sqlite"):
            ledger.changes()()
        other.rollback()
    issue(ledger, group=1)
    ledger.close()
    assert len(rows(path)) == 3


def test_a_full_disk_is_named_with_the_folder_to_make_room(tmp_path: Path, small_disk: Callable[[Path], None]) -> None:
    small_disk(tmp_path / "disk")
    ledger = Ledger(tmp_path / "disk" / "ledger.sqlite")
    for number in range(3000):
        ledger.issued(number, num=4, env="e" * 50, example=0, version=0)
    with pytest.raises(StorageError, match=f"room in {tmp_path}/disk"):
        ledger.changes()()
    with pytest.raises(StorageError):
        ledger.close()


def test_pairs_are_kept_with_the_batch_that_takes_them_and_free_where_a_run_goes_back(
    path: Path, ledger: Ledger
) -> None:
    numbers = [ledger.pair_made(version, f"pair of {version}") for version in (0, 1, 2, 3)]
    ledger.changes()()
    ledger.pairs_taken(numbers[1:2], 2)
    commit = ledger.shipping([], 2, state={}, metrics={})
    assert [data for _, data in ledger.pairs_waiting(9)] == [f"pair of {version}" for version in (3, 2, 1, 0)]
    commit()
    assert [number for number, _ in ledger.pairs_waiting(2)] == [numbers[3], numbers[2]]
    with closing(Ledger(path)) as again:
        again.resume(1)
        assert [data for _, data in again.pairs_waiting(9)] == ["pair of 1", "pair of 0"]
        assert again.pair_made(1, "another") == numbers[-1] + 1


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_is_removed_or_replaced_is_noticed_with_a_batch(path: Path, ledger: Ledger, replaced: bool) -> None:
    issue(ledger, 2)
    ship(ledger, 1, "0/0")
    content = path.read_bytes()
    path.unlink()
    if replaced:
        path.write_bytes(content)
    with pytest.raises(StorageError, match=r"ledger\.sqlite was removed or replaced"):
        ship(ledger, 2, "0/1")


def test_a_clock_that_goes_back_lets_no_rollout_change_before_it_was_issued(
    path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1e9]
    monkeypatch.setattr("grpo.orchestrator.ledger.time.time", lambda: now[0])
    issue(ledger, 3)
    ledger.changes()()
    now[0] -= 3 * 86400
    ledger.dropped(["0/0"], "env_error")
    ship(ledger, 1, "0/1")
    ledger.trained(1)
    ledger.changes()()
    with closing(Ledger(path)) as again:
        again.resume(1)
    with sqlite3.connect(path) as database:
        found = database.execute("SELECT state, issued_at, changed_at FROM rollouts ORDER BY number").fetchall()
    assert found == [("dropped", 1e9, 1e9), ("trained", 1e9, 1e9), ("dropped", 1e9, 1e9)]
