"""Which files a single answer crosses and which records are made on its way: traced in a real run, beside the page."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MAX_FILES, MAX_RECORDS = 20, 18
RUN = """
import asyncio, itertools, sys
from pathlib import Path
from tests.orchestrator.fakes import FakeServer
from tests.orchestrator.running import run

async def main(folder):
    numbers = itertools.count()
    server = await FakeServer(lambda prompt, version: "ab"[: 1 + next(numbers) % 2]).start()
    sizes = {"max_steps": 3, "batch_size": 4, "rollouts_per_example": 4, "max_async_level": 0}
    env = [{"id": f"{folder}/once.py:Once"}]
    await run(folder / "run", server, env=env, eval={"num_examples": 0}, **sizes)
    await server.stop()

asyncio.run(main(Path(sys.argv[1])))
"""
ONCE = """
from grpo import Environment, Rubric

def is_even(completion):
    return float(len(completion) % 2)

class Once(Environment):
    rubric = Rubric([is_even])
    def dataset(self, split):
        return [{"prompt": f"Example {number}"} for number in range(20)]
"""


def traced(folder: Path) -> list[dict[str, Any]]:
    """What the last group of a small run has crossed, in the order of time: one group runs at a time."""
    (folder / "once.py").write_text(ONCE)
    (way := folder / "way").mkdir()
    path = os.pathsep.join([str(Path(__file__).with_name("tracer")), str(ROOT)])
    environment = {**os.environ, "GRPO_WAY": str(way), "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", RUN, str(folder)], env=environment, check=True, timeout=300)
    lines = sorted(
        (json.loads(line) for file in way.glob("*.jsonl") for line in file.read_text().splitlines()),
        key=lambda line: line["time"],
    )
    calls = [(line.get("file"), line.get("call")) for line in lines]
    end = len(calls) - calls[::-1].index(("orchestrator/scheduler.py", "completed"))
    issued = end - calls[:end][::-1].index(("orchestrator/buffer.py", "issue"))
    begun = issued - calls[:issued][::-1].index(("orchestrator/scheduler.py", "start")) - 1
    return lines[begun:end]


def test_a_single_answer_crosses_the_files_and_records_that_the_page_tells_in_their_order(tmp_path: Path) -> None:
    section = (ROOT / "docs" / "architecture.md").read_text().partition("### A single answer, file by file\n")[2]
    section = section.partition("\n## ")[0]
    way, _, helpers = section.partition("Helpers are called too")
    rows = re.findall(r"^\d+\. `([\w/.]+)`((?:.*\n)(?: .*\n)*)", way, flags=re.M)
    beside = re.findall(r"`([\w/]+\.py)`", helpers)
    files, records = [file for file, _ in rows], [one for _, made in rows for one in re.findall(r"`(\w+)`", made)]
    seen = traced(tmp_path)
    crossed = list(dict.fromkeys(line["file"] for line in seen if "file" in line))
    assert [file for file in crossed if file not in beside] == files
    assert sorted(set(crossed) & set(beside)) == sorted(beside)
    assert sorted({line["record"] for line in seen if "record" in line}) == sorted(records)
    assert len(files) <= MAX_FILES
    assert len(records) <= MAX_RECORDS
