"""What `make contracts` finds missing in a wheel."""

import io
import zipfile

import pytest

from tools.contracts import PROTOCOLS, check, check_protocols

SOURCE = """
NAME = 1
def build(args, *, tasks): ...
class Engine(Base):
    name: str
    def __init__(self, model):
        self.model = model
        local = 1
    async def run(self, prompt): ...
"""
CONTRACTS = {
    "gone|engine NAME()": [],
    "engine build(args,tasks)": [],
    "engine Engine(name,model,run)": [],
    "engine Engine.run(prompt)": [],
    "!engine Later()": [],
    "gone Engine()": ["gone (None)"],
    "engine build(args,state)": ["build(state) (vllm/engine.py)"],
    "engine Engine(local)": ["Engine.local (vllm/engine.py)"],
    "engine Engine.stop()": ["Engine.stop (vllm/engine.py)"],
    "engine Engine.run(params)": ["Engine.run(params) (vllm/engine.py)"],
}


def test_names_parameters_and_members_that_are_missing_are_told() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as wheel:
        wheel.writestr("vllm/engine.py", SOURCE)
        for contract, missing in CONTRACTS.items():
            assert check(wheel, [contract], (0, 24)) == missing, contract
        assert check(wheel, ["!engine Later()"], (0, 28)) == ["Later (vllm/engine.py)"]


READS = """
class Engine:
    def send(self, source):
        meta = self.source.metadata
        self.client.start_weight_update()
        for name, tensor in source:
            pass
        {read}
"""


@pytest.mark.parametrize(
    ("read", "missing"), [("source.iter_full()", []), ("source.of_tomorrow()", ["of_tomorrow"]), ("pass", [])]
)
def test_what_vllm_reads_of_our_classes_must_be_there(read: str, missing: list[str]) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as wheel:
        wheel.writestr("vllm/distributed/weight_transfer/nccl_engine.py", READS.format(read=read))
        found = check_protocols(wheel, PROTOCOLS.split("\n")[1:-1], (0, 33))
        assert check_protocols(wheel, PROTOCOLS.split("\n")[1:-1], (0, 24)) == []
    assert [one.split(" ")[0] for one in found] == [f"Source.{one}" for one in missing]
