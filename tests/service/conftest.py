"""Tests of the service need the client's package, whose schema it speaks: the extra `service`."""

import warnings
from importlib.util import find_spec

import pytest

if any(find_spec(name) is None for name in ("tinker", "zstandard", "grpo.service")):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def pytest_unconfigure() -> None:
    """The stock client leaves its connections to the end of the process, which warns of them."""
    warnings.filterwarnings("ignore", category=ResourceWarning)
