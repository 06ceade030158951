"""The code of docs/sandbox.md runs as it stands there."""

import re
import textwrap
from typing import Any

from grpo.environments.critique.problems import problem_from_record
from grpo.environments.critique.testing import extract_program, run_tests
from grpo.environments.sandbox.local import LocalSandbox
from grpo.environments.sandbox.records import Limits

from tests.pages import Page

PAGE = Page("docs/sandbox.md")
BLOCKS = [block.text for block in PAGE.of("python")]


async def test_the_code_of_the_page(sandbox: LocalSandbox) -> None:
    body = textwrap.indent("\n".join(BLOCKS[:1] + BLOCKS[2:] + BLOCKS[1:2]) + "\nreturn reward\n", "    ")
    names: dict[str, Any] = {
        "answer": "```python\nprint(sum(map(int, input().split())))\n```",
        "problem_from_record": problem_from_record,
        "run_tests": run_tests,
        "extract_program": extract_program,
    }
    exec(f"async def page():\n{body}", names)
    assert await names["page"]() == 1.0


def test_every_limit_that_can_be_set_is_in_the_list() -> None:
    listed = set(re.findall(r"^- `(\w+)`:", PAGE.text, flags=re.M))
    assert set(Limits.__dataclass_fields__) <= listed
