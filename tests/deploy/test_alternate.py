"""`grpo --sleep_mode`: what it sets, and what the three programs must agree in."""

import pytest

from configs.errors import SettingsError
from deploy.arguments import parse
from deploy.plan import Plan, resolve

PRESET = "configs/quickstart"
ON_POLICY = ("--orch.max_async_level", "0")


def plan(*argv: str) -> Plan:
    return resolve(parse([PRESET, *argv]))


def problems(*argv: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        plan(*argv)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("colocated", [(), ("--colocate",)])
def test_the_flag_is_for_all_three_and_off_by_default(colocated: tuple[str, ...]) -> None:
    taking = plan("--sleep_mode", *ON_POLICY, *colocated)
    assert (taking.train.sleep_mode, taking.infer.sleep_mode, taking.orch.sleep_mode) == (True, True, True)
    apart = plan(*colocated)
    assert (apart.train.sleep_mode, apart.infer.sleep_mode, apart.orch.sleep_mode) == (False, False, False)


def test_with_batches_in_advance_it_is_refused_with_the_reason() -> None:
    [text] = problems("--sleep_mode")
    assert "sleep_mode = True: needs max_async_level: 0, not 1: with batches in advance there is always" in text


def test_one_of_the_three_alone_is_refused() -> None:
    why = "must equal the trainer's sleep_mode = False (command line (train)); all three programs take turns, or none"
    assert problems("--sleep_mode", *ON_POLICY, "--train.sleep_mode", "false") == [
        f"command line ({program}): sleep_mode = True: {why}" for program in ("orch", "infer")
    ]


def test_two_devices_have_nothing_to_take_turns_at() -> None:
    [text] = problems("--sleep_mode", *ON_POLICY, "--train.device", "cpu", "--infer.device", "cuda")
    assert "sleep_mode = True: has no effect: the trainer computes on device = 'cpu' (command line (train))" in text
