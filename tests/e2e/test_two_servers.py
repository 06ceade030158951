"""`grpo` with two real servers, of which one is killed, and started again by the launcher while the run goes on."""

import os
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from grpo.transport.run import current_run_id
from grpo.transport.status import read_status, server_of
from grpo.transport.weights.store import PolicyReader

from tests.chaos.launched import Launched
from tests.infer.server_process import children_of
from tests.support import END_S, until_gone

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.timeout(900)]

BATCH_SIZE, GROUP_SIZE = 32, 16


def make_way(*pids: int) -> None:
    """Gives the processor to others first: a run at full speed takes it from a server that starts."""
    for pid in (child for parent in pids for child in (parent, *children_of(parent))):
        with suppress(psutil.NoSuchProcess):
            for thread in psutil.Process(pid).threads():
                with suppress(ProcessLookupError):  # it has ended meanwhile
                    os.setpriority(os.PRIO_PROCESS, thread.id, 19)


def newest_in_flight(client: httpx.Client) -> int:
    """The newest version of which the server has requests; -1 where it has none."""
    counts: dict[str, int] = client.get("/policy/info").json()["in_flight"]
    return max((int(version) for version, num in counts.items() if num > 0), default=-1)


def proved_since(ledger: Path, url: str, since: float) -> list[int]:
    """The versions that the server has proved since a moment."""
    with closing(sqlite3.connect(ledger)) as database:
        query = "SELECT version FROM proofs WHERE server = ? AND proved_at > ? ORDER BY proved_at"
        return [version for (version,) in database.execute(query, (url, since))]


def check_that_nothing_is_lost(rows: Sequence[tuple[Any, ...]]) -> None:
    """`rows`: group, state, reason and step of every rollout that was issued, after the run was ended by a signal."""
    groups = Counter(group for group, *_ in rows)
    assert groups == dict.fromkeys(range(len(groups)), GROUP_SIZE)
    shipped = Counter(step for *_, step in rows if step is not None)
    assert shipped == dict.fromkeys(range(1, len(shipped) + 1), BATCH_SIZE)
    assert {reason for _, state, reason, _ in rows if state == "dropped"} <= {"run_ended"}
    assert all(step is not None for _, state, _, step in rows if state != "dropped")


def pid_of(status: Path) -> int:
    return int((read_status(status) or {})["pid"])


def test_a_run_goes_on_while_one_of_two_servers_is_killed_and_it_proves_the_versions_in_use_after_its_restart(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    with closing(Launched(folder, "--infer_replicas", "2")) as launched:
        launched.until(lambda: len(list((folder / "status").glob("infer.*.json"))) == 2)
        survivor, victim = sorted((folder / "status").glob("infer.*.json"))
        run_id = current_run_id(folder)
        assert run_id is not None
        reader = PolicyReader(folder / "broadcasts", run_id=run_id)
        with httpx.Client(base_url=server_of(victim), timeout=END_S) as second:
            launched.until(lambda: _answers(second) and newest_in_flight(second) >= 1)
            make_way(pid_of(survivor), *(pid_of(folder / "status" / f"{role}.json") for role in ("train", "orch")))

            pid, pids = pid_of(victim), children_of(pid_of(victim))
            assert pids
            died_at = time.time()
            os.kill(pid, signal.SIGKILL)
            at_death = reader.latest() or 0
            until_gone([pid, *pids])
            launched.until(lambda: (reader.latest() or 0) >= at_death + 3)

            launched.until(lambda: _answers(second) and newest_in_flight(second) > at_death)
            assert pid_of(victim) != pid
            proved = proved_since(folder / "ledger.sqlite", server_of(victim), died_at)
            assert proved
            assert min(proved) >= at_death
            at_return = reader.latest() or 0
            launched.until(lambda: newest_in_flight(second) > at_return)
        launched.launcher.send_signal(signal.SIGTERM)
        assert launched.end()[0] == 128 + signal.SIGTERM
    for log in (folder / "logs").glob("*.log"):
        assert "Traceback" not in log.read_text(), log
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as database:
        check_that_nothing_is_lost(database.execute("SELECT group_id, state, reason, step FROM rollouts").fetchall())


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False
