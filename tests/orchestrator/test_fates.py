"""What is told of events: rollouts are in the ledger's database before a server is asked for them."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from grpo.orchestrator.ledger import Ledger
from grpo.orchestrator.monitoring.fates import Fates
from grpo.orchestrator.rollouts.records import Group, SamplingParams, Task

NUM_GROUPS, NUM_AGAIN = 64, 4


async def test_groups_that_wait_for_the_ledger_share_its_transactions_though_others_begin_meanwhile(
    tmp_path: Path,
) -> None:
    path, num_written = tmp_path / "ledger.sqlite", 0
    with closing(Ledger(path)) as ledger:
        changes = ledger.changes

        def counted() -> Any:
            nonlocal num_written
            num_written += 1
            return changes()

        ledger.changes = counted  # type: ignore[method-assign]
        nothing: Any = None
        fates = Fates(ledger, nothing, nothing, nothing)

        async def begin(number: int) -> None:
            """A group begins, and after it another one in its place."""
            for again in range(NUM_AGAIN):
                group = number + again * NUM_GROUPS
                task = Task(env="e", split="train", index=group, messages=())
                fates.issued(
                    Group(
                        task=task, id=str(group), num=1, version=0, params=SamplingParams(temperature=1.0, max_tokens=8)
                    )
                )
                await fates.written()
                with sqlite3.connect(path) as database:
                    assert database.execute("SELECT count(*) FROM rollouts WHERE id = ?", [f"{group}/0"]).fetchone()[0]

        await asyncio.gather(*map(begin, range(NUM_GROUPS)))
    assert num_written < NUM_GROUPS  # of which each would have its own, and then some
