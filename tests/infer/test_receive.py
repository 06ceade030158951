"""The order of the calls to vLLM when weights are replaced, with a stand-in for its client."""

from pathlib import Path
from socket import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from configs.infer import InferSettings
from infer import vllm_api
from infer.vllm_api import Engine, EngineError
from transport.weights.nccl import Announcement, Rendezvous

ANNOUNCEMENT = Announcement(
    rendezvous=Rendezvous(host="trainer", port=29501, world_size=3),
    names=("a.weight", "b.weight"),
    dtypes=("float32", "bfloat16"),
    shapes=((2, 3), (4,)),
)


class FakeClient:
    """Notes every call; one of them may fail."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[str] = []
        self.said: dict[str, Any] = {}
        self._fails = fails
        self.errored = False
        self.model_config = SimpleNamespace(max_model_len=64, get_vocab_size=lambda: 8, dtype=torch.float32)

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> None:
            self.calls.append(name)
            self.said[name] = (args, kwargs)
            if name == self._fails:
                raise RuntimeError("out of memory")

        return call


def engine(client: FakeClient) -> Engine:
    return Engine(client, device="cuda", model_dir=Path("base"))


async def test_weights_are_received_while_the_engine_is_paused_and_the_group_is_joined_once() -> None:
    client = FakeClient()
    served = engine(client)
    for _ in range(2):
        await served.receive_weights(ANNOUNCEMENT, rank_offset=2)
    update = ["start_weight_update", "update_weights", "finish_weight_update", "resume_generation"]
    assert client.calls == [
        *("pause_generation", "init_weight_transfer_engine", *update),
        *("pause_generation", *update),
    ]
    assert client.said["pause_generation"][1] == {"mode": "wait", "clear_cache": True}
    (joined,), _ = client.said["init_weight_transfer_engine"]
    meeting = {"master_address": "trainer", "master_port": 29501, "rank_offset": 2, "world_size": 3, "packed": True}
    assert joined.init_info == meeting
    (request,), _ = client.said["update_weights"]
    assert request.update_info == {
        "names": ["a.weight", "b.weight"],
        "dtype_names": ["float32", "bfloat16"],
        "shapes": [[2, 3], [4]],
    }


async def test_what_is_said_fits_vllms_own_records() -> None:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo

    client = FakeClient()
    await engine(client).receive_weights(ANNOUNCEMENT, rank_offset=1)
    NCCLWeightTransferInitInfo(**client.said["init_weight_transfer_engine"][0][0].init_info)
    NCCLWeightTransferUpdateInfo(**client.said["update_weights"][0][0].update_info)


async def test_weights_are_loaded_from_a_folder_while_the_engine_is_paused() -> None:
    client = FakeClient()
    await engine(client).load_weights(Path("step_000003"))
    assert client.calls == ["pause_generation", "collective_rpc", "resume_generation"]
    assert client.said["collective_rpc"] == (("load_policy_weights",), {"args": ("step_000003", "base")})


@pytest.mark.parametrize("fails", ["init_weight_transfer_engine", "update_weights", "collective_rpc"])
async def test_after_a_failure_the_engine_goes_on(fails: str) -> None:
    client = FakeClient(fails)
    served = engine(client)
    taking = (
        served.load_weights(None) if fails == "collective_rpc" else served.receive_weights(ANNOUNCEMENT, rank_offset=1)
    )
    with pytest.raises(EngineError):
        await taking
    assert client.calls[-1] == "resume_generation"


async def test_a_server_on_a_cpu_cannot_receive_broadcasts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vllm_api, "device_of", lambda settings: "cpu")
    settings = InferSettings(model="m", weight_broadcast_type="nccl", enable_lora=False)
    with socket() as sock, pytest.raises(EngineError):
        async with vllm_api.embedded(settings, model_dir=tmp_path, sock=sock):
            pass
