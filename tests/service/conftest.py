"""Tests of the service need the client's package, whose schema it speaks: the extra `service`."""

import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.service.running import Running

if any(find_spec(name) is None for name in ("tinker", "zstandard", "grpo.service")):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Running]":
    """A service of two tenants without sampling."""
    from tests.service.running import running
    from tests.trainer.models import save_tiny_model

    folder = tmp_path_factory.mktemp("service")
    model = save_tiny_model(folder / "model")
    with running(folder / "run", model, "--no_sampling", "--tenants", "default,other") as service:
        yield service


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def pytest_unconfigure() -> None:
    """The stock client leaves its connections to the end of the process, which warns of them."""
    warnings.filterwarnings("ignore", category=ResourceWarning)
