"""The code of docs/sandbox.md runs as it stands there."""

import re
import textwrap
from pathlib import Path
from typing import Any, get_args

from orchestrator.envs.critique.judging import Verdict, critique_reward, extract_program, judge
from orchestrator.envs.critique.problems import problem_from_record
from orchestrator.sandbox import LimitName, Limits, LocalSandbox, RemoteSandbox, ResultCache

PAGE = (Path(__file__).parents[3] / "docs" / "sandbox.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


async def run_block(source: str, **names: Any) -> dict[str, Any]:
    body = textwrap.indent(source + "\nreturn locals()\n", "    ")
    exec(f"async def page():\n{body}", names)
    found: dict[str, Any] = await names["page"]()
    return found


async def test_the_first_program(needs_bubblewrap: None) -> None:
    found = await run_block(BLOCKS[0])
    assert found["result"].limit is None


async def test_the_external_service() -> None:
    found = await run_block(BLOCKS[1])
    assert isinstance(found["sandbox"], RemoteSandbox)


async def test_judging(sandbox: LocalSandbox) -> None:
    found = await run_block(
        BLOCKS[2],
        answer="```python\nprint(sum(map(int, input().split())))\n```",
        critique="Overall judgment: Correct",
        sandbox=sandbox,
        cache=ResultCache(Verdict),
        problem_from_record=problem_from_record,
        judge=judge,
        extract_program=extract_program,
        critique_reward=critique_reward,
        Limits=Limits,
    )
    assert found["reward"] == 1.0


def test_every_limit_that_can_be_set_is_in_the_table() -> None:
    table = {name for row in PAGE.splitlines() if row.startswith("| `") for name in re.findall(r"`(\w+)`", row)}
    assert set(Limits.__dataclass_fields__) <= table
    assert {"wall", "killed"} <= set(get_args(LimitName))
