"""Broadcasting weights, with a stand-in for vLLM's trainer side: what can be proved without GPUs."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo.transport.errors import CorruptError, DeadlineError
from grpo.transport.folders import STABLE, step_folder
from grpo.transport.weights.nccl import ANNOUNCEMENT_FILE, Announcement, Rendezvous, Source, WeightSender
from grpo.transport.weights.shards import Weight
from grpo.transport.weights.store import CANARY_FILE, PolicyPublisher, PolicyReader, verify_policy

from tests.transport.samples import SPEC, skip_before_nccl

RENDEZVOUS = Rendezvous(host="localhost", port=29501, world_size=3)
NAMES = ["a.weight", "b.weight"]
WEIGHTS = [
    Weight(name="a.weight", dtype="float32", shape=(2, 3), tensor=lambda: torch.ones(2, 3)),
    Weight(name="b.weight", dtype="bfloat16", shape=(4,), tensor=lambda: torch.zeros(4, dtype=torch.bfloat16)),
]


class FakeEngine:
    """Sends its source; what is announced and not yet stable is what receivers know by then."""

    def __init__(self, folder: Path) -> None:
        self._reader, self._folder = PolicyReader(folder, run_id="run"), folder
        self.source: Any = None
        self.sent: list[Any] = []
        self.may_end = threading.Event()
        self.may_end.set()

    def send_weights(self) -> None:
        announced = [version for version in range(5) if self._reader.poll(version) is not None]
        self.sent.append((announced, self._reader.latest(), [name for name, _ in self.source]))
        self.may_end.wait(60)
        if not self.source.metadata:
            raise ConnectionError("a server is gone")


@pytest.fixture
def engine(tmp_path: Path) -> FakeEngine:
    _ = Source(WEIGHTS).metadata  # imports vLLM, which may take longer than the deadlines below
    return FakeEngine(tmp_path)


def publisher(folder: Path, engine: FakeEngine, timeout_s: float = 60) -> PolicyPublisher:
    sender = WeightSender(RENDEZVOUS, timeout_s=timeout_s, join=lambda where, source: engine)
    return PolicyPublisher(folder, run_id="run", sender=sender)


def test_a_version_is_announced_then_sent_and_stable_once_it_has_arrived(tmp_path: Path, engine: FakeEngine) -> None:
    sender = publisher(tmp_path, engine)
    for version in (0, 1):
        sender.publish(version=version, spec=SPEC, files={CANARY_FILE: b"{}"}, weights=WEIGHTS)
    assert engine.sent == [([0], None, NAMES), ([0, 1], 0, NAMES)]
    _, held = verify_policy(step_folder(tmp_path, 1), run_id="run", version=1)
    assert held.keys() == {CANARY_FILE, ANNOUNCEMENT_FILE}
    announced = Announcement.from_json(held[ANNOUNCEMENT_FILE])
    assert announced == Announcement(
        rendezvous=RENDEZVOUS,
        session=announced.session,
        names=tuple(NAMES),
        dtypes=("float32", "bfloat16"),
        shapes=((2, 3), (4,)),
    )


def test_a_trainer_that_is_started_again_sends_what_is_there_already_in_a_session_of_its_own(
    tmp_path: Path, engine: FakeEngine
) -> None:
    sessions = set()
    for _ in range(2):
        publisher(tmp_path, engine).publish(version=0, spec=SPEC, files={CANARY_FILE: b"{}"}, weights=WEIGHTS)
        _, held = verify_policy(step_folder(tmp_path, 0), run_id="run", version=0)
        sessions.add(Announcement.from_json(held[ANNOUNCEMENT_FILE]).session)
    assert (len(engine.sent), len(sessions)) == (2, 2)


def test_a_version_whose_weights_do_not_arrive_is_never_stable(tmp_path: Path, engine: FakeEngine) -> None:
    with pytest.raises(ConnectionError):
        publisher(tmp_path, engine).publish(version=0, spec=SPEC, files={}, weights=[])
    engine.may_end.clear()
    with pytest.raises(DeadlineError, match="2 workers"):
        publisher(tmp_path, engine, timeout_s=0.1).publish(version=4, spec=SPEC, files={}, weights=WEIGHTS)
    assert not list(tmp_path.glob(f"*/{STABLE}"))
    engine.may_end.set()
    publisher(tmp_path, engine).publish(version=4, spec=SPEC, files={}, weights=WEIGHTS)
    assert PolicyReader(tmp_path, run_id="run").latest() == 4, "announced is not published"


@pytest.mark.parametrize("version", [32, 33])
def test_vllm_is_told_names_types_and_shapes_in_order(version: int) -> None:
    source = Source(WEIGHTS)
    described = source.metadata() if version == 32 else source.metadata
    assert [(one.name, one.dtype, one.shape) for one in described] == [
        ("a.weight", torch.float32, (2, 3)),
        ("b.weight", torch.bfloat16, (4,)),
    ]
    assert source.implements_iter_full()
    assert [tensor.shape for _, tensor in (source if version == 32 else source.iter_full())] == [(2, 3), (4,)]


def test_the_installed_vllm_has_the_trainer_side_that_is_used() -> None:
    skip_before_nccl()
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    info = NCCLTrainerInitInfo(master_address="h", master_port=1, world_size=2, rank=0)
    assert (info.backend, info.is_sender, info.packed) == ("nccl", True, True)
    assert WeightTransferTrainerFactory._registry["nccl"]().init_info_cls is NCCLTrainerInitInfo


@pytest.mark.parametrize("described", ['"dtypes": []', '"dtypes": ["i1"]', '"other": 0'])
def test_a_damaged_announcement_is_refused(described: str) -> None:
    rendezvous = '"rendezvous": {"host": "h", "port": 1, "world_size": 2}, "session": "s"'
    with pytest.raises(CorruptError):
        Announcement.from_json(f'{{{rendezvous}, "names": ["a"], "shapes": [[1]], {described}}}'.encode())
