"""A real server on the tiny model without anything unusual, on which policy versions are live."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from grpo.transport.run import create_run

from tests.infer.published import Publisher
from tests.infer.server_process import Server, running

MODEL = Path(__file__).parents[2] / "configs/quickstart/model"
KEY = "a key"
NUM_BATCHED_TOKENS = 64
"""Of a step of the engine: so few that long prompts are read in parts."""
SCALES = {0: 0.0, 1: 0.1, 2: 0.2}
"""By version: of the random weights of its adapter, whose seed is the version."""


@dataclass(frozen=True, kw_only=True)
class Live:
    """A server on which versions 0 (zero), 1 and 2 are live, and their publisher."""

    server: Server
    publisher: Publisher

    def load(self, version: int, **more: object) -> httpx.Response:
        run_id = self.publisher.run.run_id
        return self.server.post("/policy/load", {"run_id": run_id, "version": version, **more})


@contextmanager
def plain_server(folder: Path) -> Iterator[Live]:
    """Started with its run in `folder`, and ended afterwards. It asks for an API key."""
    publisher = Publisher(run=create_run(folder / "run"), model_dir=MODEL)
    for version, scale in SCALES.items():
        publisher.publish(version, publisher.files(version=version, seed=version, scale=scale))
    arguments: dict[str, object] = {
        "model": MODEL,
        "output_dir": publisher.run.path,
        "max_lora_rank": 8,
        "max_model_len": 512,
    }
    arguments |= {"vllm": json.dumps({"max_num_batched_tokens": NUM_BATCHED_TOKENS, "max_num_seqs": 64})}
    with running(log=folder / "infer.log", api_key=KEY, **arguments) as server:
        live = Live(server=server, publisher=publisher)
        for version in SCALES:
            response = live.load(version, alias="policy")
            assert response.status_code == 200, response.text
        yield live
