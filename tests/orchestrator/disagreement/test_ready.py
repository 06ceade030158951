"""Which pairs a batch takes, and which a run that goes on still has."""

import json
import logging
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.disagreement.ready import Ready, ReadyPairs, waiting_again
from orchestrator.disagreement.records import PairRecord, PairsFile, tokens_of
from transport.records import PreferencePair


def pair(number: int) -> PreferencePair:
    """One with `number` as its prompt, of 3 tokens."""
    ids = (np.array([one], np.int32) for one in (number, 1, 2))
    named = dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), ids, strict=True))
    return PreferencePair(**named, chosen_ref_logprob=-1.0, rejected_ref_logprob=-2.0, source="2 of 2 teachers: a, b")


def numbers(pairs: list[PreferencePair]) -> list[int]:
    return sorted(int(one.prompt_ids[0]) for one in pairs)


def ready(*versions: int, **settings: Any) -> ReadyPairs:
    """Pairs 0, 1, … of these versions."""
    made = ReadyPairs(**({"max_ready": 9, "max_off_policy_steps": None} | settings))
    for number, version in enumerate(versions):
        made.add(Ready(pair=pair(number), version=version, line=number))
    return made


def test_a_batch_takes_the_newest_and_each_once() -> None:
    made = ready(3, 1, 2, 3)
    assert numbers(made.take(2, 4)) == [0, 3]
    assert numbers(made.take(2, 4)) == [1, 2]
    assert made.take(2, 4) == []


def test_what_is_older_than_the_lag_allows_is_left_out_and_counted() -> None:
    made = ready(3, 1, 2, max_off_policy_steps=2)
    assert not made.comes_too_late(0)
    assert numbers(made.take(9, 5)) == [0, 2]  # lags 1, 3 and 2
    assert made.num == {"too_old": 1}
    assert [made.comes_too_late(version) for version in (2, 3)] == [True, False]  # for batch 6


def test_for_what_there_is_no_room_the_oldest_goes() -> None:
    made = ready(3, 1, 2, 4, max_ready=2)
    assert (len(made), made.num) == (2, {"not_taken": 2})
    assert numbers(made.take(9, 5)) == [0, 3]


def test_of_equally_old_pairs_the_first_goes_whatever_is_in_them() -> None:
    made = ready(max_ready=2)
    for number, version in enumerate((3, 3, 3, 2)):
        longer = replace(pair(number), prompt_ids=np.array([number, 5], np.int32))
        made.add(Ready(pair=longer, version=version))
    assert (len(made), made.num) == (2, {"not_taken": 2})
    assert numbers(made.take(9, 5)) == [1, 2]


# --- after a restart ---


def kept(path: Path, *versions: int) -> None:
    """A line for each."""
    file = PairsFile(path)
    for number, version in enumerate(versions):
        record = PairRecord(
            messages=[],
            chosen="x",
            rejected="y",
            source="2 of 2 teachers: a, b",
            cost=0.0,
            versions=[[version, 1], [version + 1, 1]],
            rollout_id=f"{number}/0",
            step=0,
            env="e",
            tools=None,
            base_model="identity-1",
            tokens=tokens_of(pair(number)),
        )
        assert file.append(record) == number


def again(path: Path, state: Any, **changes: Any) -> tuple[list[int], int]:
    known: dict[str, Any] = {"has_left": lambda rollout_id: False, "base_model": "identity-1", "sequence_len": 3}
    waiting, num_lines = waiting_again(path, state, **(known | changes))
    return numbers([one.pair for one in waiting]), num_lines


def test_a_run_that_goes_on_has_what_no_batch_had_taken_but_nothing_of_what_is_sampled_again(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    made = ready(0, 1, 2)
    assert numbers(made.take(1, 3)) == [2]
    state = json.loads(json.dumps(made.state()))
    assert state == {"num_lines": 3, "waiting": [0, 1]}
    kept(path, 0, 1, 2, 3, 4)
    assert again(path, state) == ([0, 1], 5)
    assert again(path, state, has_left={"2/0", "4/0"}.__contains__) == ([0, 1, 4], 5), "2 was taken"
    assert again(path, None) == ([], 5), "a state without pairs says nothing of them"
    assert again(tmp_path / "none", state) == ([], 0)


def test_resuming_holds_one_line_of_the_file_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    kept(path, *range(20))
    path.write_bytes(path.read_bytes().replace(b'"messages": []', b'"messages": ["' + b"x" * 200_000 + b'"]'))
    tracemalloc.start()
    try:
        assert again(path, {"num_lines": 0, "waiting": []}, has_left=lambda rollout_id: True)[1] == 20
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 2_000_000, "the file has 4 MB"


def test_what_a_run_left_behind_when_it_went_back_is_never_taken_up(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    kept(path, 0, 1, 2, 3)
    assert again(path, {"num_lines": 2, "waiting": [1]}) == ([1], 4)
    made = ReadyPairs(max_ready=9, max_off_policy_steps=None, num_lines=4)
    made.take(9, 3)
    assert again(path, made.state()) == ([], 4)


def test_what_cannot_be_trained_or_read_is_left_out_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pairs.jsonl"
    kept(path, 0, 1)
    state = {"num_lines": 2, "waiting": [0, 1]}
    assert again(path, state) == ([0, 1], 2)
    assert again(path, state, base_model="identity-2") == ([], 2)
    assert again(path, state, sequence_len=2) == ([], 2)
    with path.open("ab") as file:
        file.write(b"{}\n")
    with caplog.at_level(logging.WARNING):
        assert again(path, {"num_lines": 3, "waiting": [0, 2, 7]}) == ([0], 3)
    assert caplog.text.count("a pair that no batch has taken is left out") == 1
    assert "line 3 is no preference pair" in caplog.text
    assert "1 pairs that no batch has taken are left out" in caplog.text
    assert f"{path} has 3 lines" in caplog.text
