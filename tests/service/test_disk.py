"""What the service does where the disk takes no more."""

import resource
from pathlib import Path
from typing import Any

import pytest
from grpo.transport.errors import START_AGAIN
from grpo.transport.ports import free_port
from tinker import types

from tests.service.data import datum
from tests.service.running import Running, done, running
from tests.support import until

MODEL = Path(__file__).parents[2] / "configs" / "tiny" / "model"
pytestmark = [
    pytest.mark.service,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::ResourceWarning"),
]
STEPS, FULL_AT = 4, 2


def limit_files(service: Running, num_bytes: int) -> None:
    """Lets no file of the service grow beyond, which a full disk does too."""
    _, most = resource.prlimit(service.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(service.pid, resource.RLIMIT_FSIZE, (num_bytes, most))


def trained(service: Running, *, is_full: bool) -> dict[str, bytes]:
    """The files of a checkpoint after some steps, before one of which the log has no room where the disk `is_full`."""
    client, ends = service.training_client(), list[Any]()
    for step in range(STEPS):
        if is_full and step == FULL_AT:
            limit_files(service, (service.folder / "commands.sqlite-wal").stat().st_size)
        ends.append(client.forward_backward([datum(12, step)], "cross_entropy"))
        ends.append(client.optim_step(types.AdamParams(learning_rate=1e-2)))
        if is_full and step == FULL_AT:
            until(lambda: not service.is_up())
            assert service.end() == START_AGAIN
            assert "commands.sqlite cannot be written" in service.folder.with_suffix(".log").read_text()
            service.start()
        for end in ends:
            end.result()
    path = done(client.save_state("end")).path
    folder = service.folder / "checkpoints" / path.removeprefix("tinker://")
    return {name: (folder / name).read_bytes() for name in ("adapter_model.safetensors", "optimizer.safetensors")}


def test_a_service_whose_log_is_full_ends_and_the_same_command_goes_on(tmp_path: Path) -> None:
    with running(tmp_path / "run", MODEL, "--no_sampling", "--port", str(free_port())) as service:
        assert trained(service, is_full=False) == trained(service, is_full=True)
