"""docs/architecture.md names the files that a rollout and a batch go through, and no others."""

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from aiohttp import web

from orchestrator import background
from orchestrator.run import orchestrate
from tests.orchestrator.fakes import FakeServer, FakeTrainer, settings_for

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
NAMED = set(re.findall(r"`((?:orchestrator|infer|trainer|transport)/[\w/]*(?:\.py)?)`", PAGE))
IN_OTHER_PROGRAMS = {"orchestrator/workers/worker.py"}
MANY = 15
"""The way of a rollout is told in a dozen files, and so is that of a batch."""


def way(what: str) -> list[str]:
    """The files in a table of the page."""
    section = PAGE.partition(f"## The way of a {what}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| \d+ \| `([\w/.]+)`", section, flags=re.M)


def test_every_file_that_is_named_is_there_and_both_ways_are_short() -> None:
    assert not {name for name in NAMED if not (ROOT / name).exists()}
    for what in ("rollout", "batch"):
        assert 10 <= len(way(what)) <= MANY


@contextmanager
def followed(files: set[str]) -> Iterator[threading.Event]:
    """Adds the files of functions that are called while the event is set, in threads too."""
    on = threading.Event()

    def call(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and on.is_set():
            files.add(frame.f_code.co_filename)

    threading.setprofile(call)
    sys.setprofile(call)
    try:
        yield on
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


class Following(FakeServer):
    """Follows from the first rollout on."""

    on: threading.Event

    async def _generate(self, request: web.Request) -> web.Response:
        self.on.set()
        return await super()._generate(request)


async def test_a_rollout_goes_through_the_files_that_are_named_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_threads", background._Threads())  # threads of other tests are not followed
    files: set[str] = set()
    FakeTrainer(tmp_path).start()
    server = Following()
    await server.start()
    with followed(files) as server.on:
        await orchestrate(settings_for(tmp_path, server, eval={"num_examples": 0}))
    await server.stop()
    inside = {str(Path(name).relative_to(ROOT)) for name in files if name.startswith(f"{ROOT}/")}
    passed = {name for name in inside if name.startswith("orchestrator/")}
    folders = tuple(name for name in NAMED if name.endswith("/"))
    assert not {name for name in passed - NAMED if not name.startswith(folders)}
    ours = {name for name in way("rollout") if name.startswith("orchestrator/")}
    assert not ours - passed - IN_OTHER_PROGRAMS
