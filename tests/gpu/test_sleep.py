"""A server on a GPU that sleeps and wakes, with and without sharing its weights.

Not yet run: needs a GPU.
"""

import json
from pathlib import Path

import pytest
import torch
from grpo.transport.run import create_run

from tests.infer.server_process import running

pytestmark = pytest.mark.gpu

MODEL = Path(__file__).parents[2] / "configs/quickstart/model"
CACHE_BYTES = 2**30
IDS = list(range(40, 100))


@pytest.mark.parametrize("colocate", [False, True])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_the_gpu_has_the_servers_memory_back_while_it_sleeps(
    gpu: torch.device, tmp_path: Path, colocate: bool, enforce_eager: bool
) -> None:
    create_run(tmp_path / "run")
    settings = {"model": MODEL, "output_dir": tmp_path / "run", "device": "cuda"}
    settings["vllm"] = json.dumps({"kv_cache_memory_bytes": CACHE_BYTES})
    settings |= {"colocate": colocate, "enforce_eager": enforce_eager, "sleep_mode": True}

    def free() -> int:
        return int(torch.cuda.mem_get_info(gpu)[0])

    with running(log=tmp_path / "infer.log", **settings) as server:

        def answers() -> tuple[object, object]:
            sampled = server.answer("/policy/generate", version=None, prompt_token_ids=IDS, max_tokens=32, seed=1)
            return server.answer("/policy/score", version=None, token_ids=IDS)["logprobs"], sampled["choices"]

        before, free_awake = answers(), free()
        for _ in range(3):
            server.answer("/policy/sleep")
            assert free() - free_awake >= 0.95 * CACHE_BYTES
            refused = server.post("/policy/score", {"version": None, "token_ids": IDS})
            assert (refused.status_code, refused.json()["error"]["type"]) == (503, "asleep")
            server.answer("/policy/wake")
            assert answers() == before
            assert free() == pytest.approx(free_awake, rel=0.02)
