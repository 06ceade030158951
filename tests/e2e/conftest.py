"""What takes long to make and several modules only look at."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.plain_server import Live, plain_server
from tests.e2e.readme import NUM_STEPS, command, run


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server that its users leave as it is: versions 0 to 2 stay live, what they load besides they number from 10."""
    with plain_server(tmp_path_factory.mktemp("plain")) as live:
        yield live


@pytest.fixture(scope="session")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run of README.md's one command, with NUM_STEPS steps."""
    folder = tmp_path_factory.mktemp("first")
    steps = {f"GRPO_{program}_MAX_STEPS": str(NUM_STEPS) for program in ("ORCH", "TRAIN")}
    done = run(command("grpo quickstart --output_dir outputs/first"), folder, os.environ | steps)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "outputs/first"
