"""A kill -9 of the service, one of a process that trains with it, and a full disk, each in the middle of a script that
goes on by itself to the bytes of one that met nothing. `benchmarks.service_kills` kills all kinds of process."""

import resource
import signal
from collections.abc import Callable, Iterator

import psutil
import pytest
from grpo.transport.errors import START_AGAIN
from grpo.transport.ports import free_port
from tinker import types

from tests.service.data import datum
from tests.service.running import Running, done, running
from tests.support import until, until_gone
from tests.trainer.models import save_tiny_model

pytestmark = [
    pytest.mark.service,
    pytest.mark.chaos,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::ResourceWarning"),
]
STEPS, EARLY, LATE = 11, 2, 9
"""A step before the first state on disk, which is written after eight, and one after it."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("kills")
    model = save_tiny_model(folder / "model")
    options = ("--no_sampling", "--gpus", "2", "--port", str(free_port()))
    with running(folder / "run", model, *options) as service:
        yield service


def script(
    service: Running, happens: Callable[[], None] | None = None, at: int = -1, code: int = START_AGAIN
) -> dict[str, bytes]:
    """The files of a checkpoint after some steps of two gradients. In step `at`, with one of them there and one in
    flight, something happens that ends the service with this code, and the same command starts it again."""
    client = service.training_client()
    for step in range(STEPS):
        done(client.forward_backward([datum(12, step), datum(9, step + 20)], "cross_entropy"))
        second = client.forward_backward([datum(11, step + 50)], "cross_entropy")
        if happens is not None and step == at:
            happens()
        optim = client.optim_step(types.AdamParams(learning_rate=1e-2))
        if happens is not None and step == at:
            until(lambda: not service.is_up())
            assert service.end() == code
            service.start()
        done(second), done(optim)
    folder = service.folder / "checkpoints" / done(client.save_state("end")).path.removeprefix("tinker://")
    return {name: (folder / name).read_bytes() for name in ("adapter_model.safetensors", "optimizer.safetensors")}


@pytest.fixture(scope="module")
def expected(service: Running) -> dict[str, bytes]:
    return script(service)


def other_rank(service: Running) -> psutil.Process:
    [rank] = [one for one in psutil.Process(service.pid).children() if "grpo.service.ranks" in one.cmdline()]
    return rank


def test_a_full_disk(service: Running, expected: dict[str, bytes]) -> None:
    """No file may grow beyond what the log has come to."""

    def happens() -> None:
        size = (service.folder / "commands.sqlite-wal").stat().st_size
        _, most = resource.prlimit(service.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(service.pid, resource.RLIMIT_FSIZE, (size, most))

    assert script(service, happens, EARLY) == expected
    assert "commands.sqlite cannot be written" in service.folder.with_suffix(".log").read_text()


def test_kill_9_of_the_service(service: Running, expected: dict[str, bytes]) -> None:
    def happens() -> None:
        rank = other_rank(service).pid
        service.end(signal.SIGKILL)
        until_gone([rank])

    assert script(service, happens, EARLY, code=-signal.SIGKILL) == expected


def test_kill_9_of_a_process_that_trains(service: Running, expected: dict[str, bytes]) -> None:
    def happens() -> None:
        other_rank(service).kill()

    assert script(service, happens, LATE) == expected
