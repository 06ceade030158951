"""`grpo --sleep_mode`: what it sets, and where it is refused."""

import shlex
from pathlib import Path

import pytest

from configs.errors import SettingsError
from configs.run import load_run
from deploy.gpus import VisibleGpus
from deploy.plan import Plan, resolve

PAGE = Path(__file__).parents[2] / "docs/colocation.md"
SLEEP = ("--sleep_mode", "--orch.max_async_level", "0")
ONE_GPU = VisibleGpus(names=("0",))


def plan(*argv: str, visible: VisibleGpus = ONE_GPU) -> Plan:
    return resolve(load_run("configs/quickstart", argv), visible=visible)


@pytest.mark.parametrize("colocated", [(), ("--colocate",)])
def test_the_flag_is_for_all_three_and_off_by_default(colocated: tuple[str, ...]) -> None:
    for options, expected in ((SLEEP, True), ((), False)):
        found = plan(*options, *colocated)
        assert {found.train.sleep_mode, found.infer.sleep_mode, found.orch.sleep_mode} == {expected}


@pytest.mark.parametrize(
    "argv",
    [
        ("--sleep_mode", "--orch.max_async_level", "1"),
        (*SLEEP, "--train.sleep_mode", "false"),
        (*SLEEP, "--infer.device", "cuda", "--train.device", "cpu"),
        (*SLEEP, "--infer.device", "cpu"),
    ],
)
def test_it_is_refused_with_batches_in_advance_for_one_alone_and_on_a_cpu(argv: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError, match="sleep_mode = True"):
        plan(*argv)


def test_without_a_gpu_it_is_refused_with_the_reason() -> None:
    with pytest.raises(SettingsError, match="sleep_mode = True: needs a GPU"):
        plan(*SLEEP, visible=VisibleGpus())


def test_the_pages_command_resolves() -> None:
    [line] = [line for line in PAGE.read_text().splitlines() if line.startswith("grpo reverse_text --colocate")]
    found = resolve(load_run(shlex.split(line)[1], shlex.split(line)[2:]), visible=ONE_GPU)
    assert found.orch.sleep_mode
    assert found.train.colocate
