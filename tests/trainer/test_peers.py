"""Who is at fault when ranks no longer reach each other."""

import re
import time
from pathlib import Path

import pytest

from trainer.errors import BatchError, RankFailed, RanksApart
from trainer.parallel import ONE, Ranks
from trainer.peers import cause_of, status_of
from transport.run import RunFolder, found_run
from transport.status import read_status

BROKEN = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]")
LATE = RuntimeError("Timed out waiting 60000ms for recv operation to complete")
FIRST, SECOND = (Ranks(rank=rank, size=2) for rank in (0, 1))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return found_run(tmp_path / "run")


def test_a_connection_that_broke_off_is_the_fault_of_the_rank_that_failed(run: RunFolder) -> None:
    status_of(run, SECOND).failed(BatchError("step 3 has no loss tokens"))
    cause = cause_of(BROKEN, run, FIRST, look_s=5)
    assert isinstance(cause, RankFailed)
    assert "rank 1" in str(cause)


def test_the_main_ranks_failure_is_found_in_the_trainers_status(run: RunFolder) -> None:
    status_of(run, FIRST).failed(OSError("the disk is full"))
    assert read_status(run.status / "train.json")["state"] == "failed"  # type: ignore[index]
    assert "rank 0" in str(cause_of(BROKEN, run, SECOND, look_s=5))


def test_where_nobody_else_has_failed_the_error_is_ones_own(run: RunFolder) -> None:
    status_of(run, SECOND).set("training", step=3)
    assert cause_of(BROKEN, run, FIRST, look_s=0.3) is BROKEN


def test_an_error_that_explains_itself_is_not_searched_for(run: RunFolder) -> None:
    error = BatchError("no loss tokens")
    status_of(run, SECOND).failed(OSError("another one"))
    began_s = time.monotonic()
    assert cause_of(error, run, FIRST, look_s=250) is error
    assert cause_of(BROKEN, run, ONE, look_s=250) is BROKEN
    assert time.monotonic() - began_s < 60


def test_ranks_that_the_user_ends_look_for_no_failure(run: RunFolder) -> None:
    ended = SystemExit(143)
    began_s = time.monotonic()
    assert cause_of(ended, run, FIRST, look_s=250) is ended
    status_of(run, FIRST).failed(ended)
    assert cause_of(ended, run, SECOND, look_s=250) is ended
    assert time.monotonic() - began_s < 60


def test_a_rank_that_is_told_to_end_while_it_looks_says_whose_failure_it_found(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(_: float) -> None:
        status_of(run, SECOND).failed(BatchError("too long"))
        raise SystemExit(143)

    monkeypatch.setattr(time, "sleep", ended)
    cause = cause_of(BROKEN, run, FIRST, look_s=30)
    assert isinstance(cause, RankFailed)


def test_a_communication_that_took_too_long_says_what_the_other_ranks_do(run: RunFolder) -> None:
    status_of(run, SECOND).set("waiting", step=3, waiting_for="orchestrator: batch 3")
    cause = cause_of(LATE, run, FIRST, look_s=0.3)
    assert isinstance(cause, RanksApart)
    assert re.search("rank 1 .*step 3", str(cause))


def test_a_rank_that_is_told_to_end_has_not_failed(run: RunFolder) -> None:
    status_of(run, SECOND).failed(SystemExit(143))
    assert read_status(run.status / "train.rank_1.json")["state"] == "finished"  # type: ignore[index]
