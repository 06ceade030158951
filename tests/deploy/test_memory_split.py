"""Who gets what of a device, and when there is no room."""

import subprocess
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.memory_estimates import CONFIGS
from configs.infer import InferSettings
from configs.train import TrainSettings
from deploy.memory.device import DeviceError, DeviceMemory, gpu_memory, main_memory
from deploy.memory.dry_step import DryStep
from deploy.memory.estimate import GIB, MIB, Need, estimate
from deploy.memory.shapes import ModelShape
from deploy.memory.split import SERVER_FIXED_BYTES, NoRoom, Split, server_need, split
from deploy.memory.table import lines

SMALL, LARGE = (ModelShape.of_config(CONFIGS[name]) for name in ("0.6B", "8B"))
TRAIN = TrainSettings(model="qwen3", gradient_checkpointing=True)


def device(total_gib: float, free_gib: float | None = None) -> DeviceMemory:
    return DeviceMemory(total=int(total_gib * GIB), free=int((total_gib if free_gib is None else free_gib) * GIB))


def infer(**changes: Any) -> InferSettings:
    return InferSettings(**({"model": "qwen3", "max_model_len": 4096} | changes))


def needs(gib: float, *, step_gib: float = 0.0) -> Need:
    """A trainer that keeps so many GiB, and needs so many more in a step."""
    return Need(stays=int(gib * GIB), step=int(step_gib * GIB))


def split_of(shape: ModelShape, memory: DeviceMemory, server: InferSettings, **options: Any) -> Split:
    return split(TRAIN, server, shape, memory=memory, shared="linear", **options)


def test_the_server_gets_nine_tenths_of_what_the_trainer_leaves() -> None:
    # 0.9 * (20 - 4) = 14.4 GiB of 24
    divided = split_of(SMALL, device(24, 20), infer(), need=needs(4))
    assert (divided.utilization, divided.chosen, divided.overcommitted) == (0.6, False, 0)
    assert divided.server == pytest.approx(14.4 * GIB, abs=1)


def test_the_share_is_rounded_down() -> None:
    divided = split_of(SMALL, device(24), infer(), need=needs(5))
    assert divided.utilization == 0.712  # 0.9 * 19 / 24 = 0.7125
    assert divided.server <= 0.9 * 19 * GIB


def test_without_a_measurement_the_trainers_need_is_the_estimate() -> None:
    divided = split_of(SMALL, device(24), infer())
    assert divided.trainer == estimate(TRAIN, SMALL, device="cuda", shared="linear").need


def test_what_the_user_set_is_kept_and_what_is_too_much_is_told() -> None:
    fits, exceeds = (
        split_of(SMALL, device(24), infer(gpu_memory_utilization=share), need=needs(4)) for share in (0.5, 0.9)
    )
    assert (fits.utilization, fits.chosen, fits.overcommitted) == (0.5, True, 0)
    assert (exceeds.utilization, exceeds.chosen) == (0.9, True)
    assert exceeds.overcommitted == pytest.approx(1.6 * GIB, abs=1)  # 0.9 * 24 + 4 - 24
    # The default, written down, is the user's wish too.
    assert split_of(SMALL, device(8), infer(gpu_memory_utilization=0.9), need=needs(7)).chosen


def test_the_server_starts_with_weights_places_of_adapters_and_one_longest_sequence() -> None:
    need = server_need(TRAIN, infer(max_loras=3), SMALL)
    assert need.weights == 2 * 596_049_920
    # A and B of rank 16 on all linear layers of 28 layers, 2 bytes, three times: q 1024 + 2048, k and v 1024 + 1024
    # each, o 2048 + 1024, gate, up and down 1024 + 3072 each.
    assert need.adapters == 3 * 2 * 28 * 16 * (3072 + 2 * 2048 + 3072 + 3 * 4096)
    assert need.cache == 2 * 28 * 8 * 128 * 4096 * 2
    assert need.total == need.weights + need.adapters + need.cache + SERVER_FIXED_BYTES
    without = server_need(TRAIN, InferSettings(model="qwen3", enable_lora=False), SMALL)
    assert (without.adapters, without.cache) == (0, 10 * need.cache)  # 40,960 tokens, what the model allows


def test_no_room_says_what_each_change_saves_the_most_first() -> None:
    train = TrainSettings(model="qwen3")
    with pytest.raises(NoRoom) as refused:
        split(train, infer(max_model_len=None), LARGE, memory=device(24), shared="linear")
    message = str(refused.value)
    assert "of 24.0 GiB free device memory the trainer needs" in message
    assert "gpu_memory_utilization (infer.yaml) yourself" in message
    changes = (
        "gradient_checkpointing: true (train.yaml)",
        "qlora_bnb: true (train.yaml)",
        "sequence_len: 1024 (train.yaml; seq_len in orch.yaml)",
        "max_model_len: 2048 (infer.yaml)",
        "max_loras: 2 (infer.yaml)",
    )
    places = [message.index(change) for change in changes]
    assert places == sorted(places)
    checkpointed = train.model_copy(update={"gradient_checkpointing": True})
    needs = [estimate(one, LARGE, device="cuda", shared="linear").total for one in (train, checkpointed)]
    assert f"gradient_checkpointing: true (train.yaml) (saves {(needs[0] - needs[1]) / GIB:.1f} GiB)" in message


def test_what_is_on_already_is_not_proposed() -> None:
    train = TrainSettings(model="qwen3", gradient_checkpointing=True, qlora_bnb=True)
    with pytest.raises(NoRoom) as refused:
        split(train, infer(max_model_len=1024, max_loras=2), LARGE, memory=device(10), shared="linear")
    proposed = str(refused.value).partition("Change one or more of: ")[2]
    assert proposed.startswith("sequence_len: 1024 ")
    assert proposed.count("saves") == 2
    assert "; --sleep_mode, with max_async_level: 0" in proposed


def test_a_measured_step_takes_the_place_of_the_estimated_one() -> None:
    need = estimate(TRAIN, SMALL, device="cuda")
    measured = DryStep(allocated=need.step - MIB, held=need.step + 7 * MIB)
    assert measured.corrected(need) == Need(stays=need.total - need.step, step=need.step + 7 * MIB)


def test_the_table_tells_estimate_measurement_saving_and_shares() -> None:
    need = estimate(TRAIN, SMALL, device="cuda")
    measured = DryStep(allocated=300 * MIB, held=400 * MIB)
    divided = split_of(SMALL, device(24), infer(gpu_memory_utilization=0.95), need=needs(4))
    told = {line[:48].strip(): line[48:].split() for line in lines(need, measured=measured, split=divided)}
    assert told["trainer's memory"] == ["estimate", "measured", "held"]
    assert told["a step"][2:] == ["0.29", "GiB", "0.39", "GiB"]
    assert told["total"][2:] == [f"{measured.corrected(need).total / GIB:.2f}", "GiB"]
    assert told["base weights saved by sharing"] == ["0.82", "GiB"]  # 2 * 440,401,920 bytes
    assert told["device memory, free"] == ["24.00", "GiB", "24.00", "GiB"]
    assert told["server: gpu_memory_utilization 0.95, as infer.yaml"[:48]]
    assert any("exceed what is free by 2.80 GiB" in line for line in lines(need, split=divided))


# --- in turns ---

TURNS = TRAIN.model_copy(update={"sleep_mode": True})


def in_turns(memory: DeviceMemory, *, need: Need, **changes: Any) -> Split:
    return split(TURNS, infer(sleep_mode=True, **changes), SMALL, memory=memory, shared="linear", need=need)


def test_in_turns_the_server_gets_what_the_trainers_step_leaves_too() -> None:
    need = needs(4, step_gib=6)
    # Apart 0.9 * (24 - 10) = 12.6 GiB, in turns 0.9 * (24 - 4) = 18: 0.9 * 6 more.
    assert split_of(SMALL, device(24), infer(), need=need).utilization == 0.525
    divided = in_turns(device(24), need=need)
    assert (divided.utilization, divided.overcommitted) == (0.75, 0)
    assert divided.gained == pytest.approx(5.4 * GIB, abs=1)
    # 2 GiB that are assumed, weights of 2 bytes, places for 10 adapters of 10,092,544 parameters and 2 bytes.
    assert divided.at_rest == 2 * GIB + 2 * 596_049_920 + 10 * 2 * 10_092_544


def test_one_of_the_two_alone_takes_no_turns() -> None:
    need = needs(4, step_gib=6)
    for train, server in ((TURNS, infer()), (TRAIN, infer(sleep_mode=True))):
        divided = split(train, server, SMALL, memory=device(24), shared="linear", need=need)
        assert (divided.utilization, divided.at_rest, divided.gained) == (0.525, None, 0)


def test_a_server_at_rest_and_a_step_must_have_room_together() -> None:
    # At rest the server keeps 2 + 1.110 + 0.188 = 3.298 GiB, for which a step may leave 3.665: 0.9 * 3.665 = 3.298.
    assert in_turns(device(24), need=needs(4, step_gib=16.33)).utilization == 0.75
    with pytest.raises(NoRoom) as refused:
        in_turns(device(24), need=needs(4, step_gib=16.34))
    message = str(refused.value)
    assert "of 24.0 GiB free device memory the trainer keeps 4.0 GiB, which leaves the server 18.0 GiB" in message
    assert "; at rest it keeps 3.3 GiB, beside a step of 16.3 GiB. Change one" in message
    assert "--sleep_mode" not in message


def test_what_is_too_much_in_turns_is_told_of_the_worse_of_the_two() -> None:
    # While it samples 4 + 0.9 * 24 = 25.6 GiB; while it steps 4 + 6 + 3.298.
    assert in_turns(device(24), need=needs(4, step_gib=6), gpu_memory_utilization=0.9).overcommitted == pytest.approx(
        1.6 * GIB, abs=1
    )
    # 4 + 18 + 3.298 = 25.298 GiB; while it samples 4 + 12.
    stepping = in_turns(device(24), need=needs(4, step_gib=18), gpu_memory_utilization=0.5)
    assert stepping.overcommitted == pytest.approx(1.298 * GIB, abs=0.001 * GIB)
    assert stepping.gained == 0
    assert in_turns(device(24), need=needs(4, step_gib=6), gpu_memory_utilization=0.8).overcommitted == 0


def test_taking_turns_is_proposed_where_it_saves() -> None:
    with pytest.raises(NoRoom) as refused:
        split(TRAIN, infer(), LARGE, memory=device(24), shared="linear")
    # A step or the cache of one longest sequence, whichever is smaller: 2 * 36 layers * 8 heads * 128 * 4,096 tokens
    # * 2 bytes are 0.5625 GiB, and a step is larger.
    assert "--sleep_mode, with max_async_level: 0 (orch.yaml) (saves 0.6 GiB)" in str(refused.value)


def test_the_table_tells_what_taking_turns_gains() -> None:
    divided = in_turns(device(24), need=needs(4, step_gib=6))
    need = estimate(TURNS, SMALL, device="cuda")
    told = {line[:48].strip(): line[48:].split() for line in lines(need, split=divided)}
    assert told["stays when a step is over"] == [f"{need.stays / GIB:.2f}", "GiB"]
    assert told["of it kept at rest, while the trainer steps"] == ["3.30", "GiB"]
    assert told["of it gained by taking turns"] == ["5.40", "GiB"]


def test_a_gpus_memory_is_what_its_driver_tells_of_the_visible_one() -> None:
    asked: list[Sequence[str]] = []

    def run(command: Sequence[str]) -> str:
        asked.append(command)
        return "24576, 24000\n"

    memory = gpu_memory({"CUDA_VISIBLE_DEVICES": "GPU-8f,GPU-11"}, run)
    assert memory == DeviceMemory(total=24 * GIB, free=24_000 * MIB)
    assert "--id=GPU-8f" in asked[0]


@pytest.mark.parametrize("printed", ["", "[N/A], [N/A]\n", "1, 2, 3"])
def test_a_driver_that_tells_nothing_is_an_error_that_says_what_to_do(printed: str) -> None:
    with pytest.raises(DeviceError, match=r"set gpu_memory_utilization \(infer.yaml\) yourself"):
        gpu_memory({}, lambda command: printed)


def test_a_driver_that_is_not_there_is_the_same_error() -> None:
    def run(command: Sequence[str]) -> str:
        raise subprocess.CalledProcessError(9, list(command))

    with pytest.raises(DeviceError, match="GPU 0"):
        gpu_memory({}, run)


def test_main_memory_is_this_machines() -> None:
    memory = main_memory()
    assert 0 < memory.free <= memory.total
