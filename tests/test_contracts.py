"""What `make contracts` finds missing in a wheel."""

import io
import zipfile
from pathlib import Path

import pytest

from tools.contracts import PROTOCOLS, all_contracts, check, check_classes, check_protocols, modules_without

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
            assert check(wheel, [contract], (0, 26)) == missing, contract
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
        assert check_protocols(wheel, PROTOCOLS.split("\n")[1:-1], (0, 26)) == []
    assert [one.split(" ")[0] for one in found] == [f"Source.{one}" for one in missing]


BASE = """
class Source(ABC):
    @abstractmethod
    def names(self): ...
    @property
    @abstractmethod
    def metadata(self): ...
"""
THEIRS = """
from vllm.base import Source as Base
class Weights(Base):
    def names(self): ...
    def send(self, name, tensor): ...
"""
AS_A_METHOD = "def metadata(self): ..."
AS_A_PROPERTY = "@functools.cached_property\n    def metadata(self): ..."
OURS = [
    ("is Weights", AS_A_PROPERTY, []),
    ("is Weights", AS_A_METHOD, ["Ours.metadata as a property"]),
    ("is Weights", "def names(self): ...", ["Ours.metadata, which is abstract"]),
    ("is Weights", f"{AS_A_PROPERTY}\n    def send(self, tensor): ...", ["Ours.send(name)"]),
    ("is Weights", f"{AS_A_PROPERTY}\n    def send(self, **named): ...", []),
    ("is Gone", AS_A_PROPERTY, ["Ours (ours.py) or Gone (weights)"]),
    ("resembles Weights", f"{AS_A_PROPERTY}\n    def send(self): ...", []),
    ("extends Weights", "def other(self): ...", []),
    ("extends Weights", "def send(self): ...", ["Ours.send, which is there already"]),
]


@pytest.mark.parametrize(("relation", "body", "problems"), OURS)
def test_classes_of_ours_are_held_against_those_of_vllm_that_they_stand_for(
    relation: str, body: str, problems: list[str], tmp_path: Path
) -> None:
    (tmp_path / "ours.py").write_text(f"class Ours:\n    {body}\n")
    kind, theirs = relation.split()
    line = f"ours.py Ours {kind} weights {theirs} 0.28"
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as wheel:
        wheel.writestr("vllm/base.py", BASE)
        wheel.writestr("vllm/weights.py", THEIRS)
        found = check_classes(wheel, [line], (0, 33), tmp_path)
        assert check_classes(wheel, [line], (0, 26), tmp_path) == []
    assert [one.partition(" (ours.py,")[0] for one in found] == problems


def test_there_is_a_contract_for_every_module_of_vllm_that_our_sources_name() -> None:
    contracts = all_contracts()
    assert modules_without(contracts) == []
    assert modules_without([one for one in contracts if not one.startswith("lora.request ")]) == ["lora.request"]
