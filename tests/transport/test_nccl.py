"""Broadcasting weights, with a stand-in for the group: what can be proved without a GPU."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.common import FilesystemBroadcast, NcclBroadcast, publisher_arguments
from tests.transport.samples import SPEC
from transport.errors import CorruptError, DeadlineError
from transport.run import found_run
from transport.weights.base import CANARY_FILE, Weight
from transport.weights.channel import open_publisher
from transport.weights.filesystem import FilesystemPolicyPublisher, FilesystemPolicyReader
from transport.weights.memory import MemoryPolicies
from transport.weights.nccl import ANNOUNCEMENT_FILE, Announcement, Meeting, NcclPolicyPublisher

MEETING = Meeting(host="localhost", port=29501, world_size=3)
ARRAYS = {"a.weight": np.ones((2, 3), np.float32), "b.weight": np.zeros((4,), np.float32)}


def weights(arrays: dict[str, np.ndarray] = ARRAYS, **wrong_shapes: tuple[int, ...]) -> list[Weight]:
    return [
        Weight(
            name=name,
            dtype="F32",
            shape=wrong_shapes.get(name[0], array.shape),
            read=array.tobytes,
            tensor=lambda array=array: array,  # type: ignore[misc]
        )
        for name, array in arrays.items()
    ]


class FakeGroup:
    """Takes what is sent; what was published when it began is what receivers know by then."""

    def __init__(self, policies: MemoryPolicies) -> None:
        self._policies = policies
        self.events: list[Any] = []
        self.may_end = threading.Event()
        self.may_end.set()

    def send(self, tensor: Any) -> None:
        self.events.append((self._policies.latest(), tensor.shape))

    def wait(self) -> None:
        self.may_end.wait(60)
        self.events.append("arrived")


@pytest.fixture
def policies() -> MemoryPolicies:
    return MemoryPolicies(run_id="run")


def publisher(
    policies: MemoryPolicies, group: FakeGroup, timeout_s: float = 60
) -> tuple[NcclPolicyPublisher, list[Meeting]]:
    joined: list[Meeting] = []

    def join(meeting: Meeting) -> FakeGroup:
        joined.append(meeting)
        return group

    return NcclPolicyPublisher(policies, MEETING, timeout_s=timeout_s, join=join), joined


def test_a_version_is_announced_before_it_is_sent_in_the_announced_order(policies: MemoryPolicies) -> None:
    group = FakeGroup(policies)
    sender, joined = publisher(policies, group)
    for version in (0, 1):
        sender.publish(version=version, spec=SPEC, files={CANARY_FILE: b"{}"}, weights=weights())
    assert group.events == [(0, (2, 3)), (0, (4,)), "arrived", (1, (2, 3)), (1, (4,)), "arrived"]
    assert joined == [MEETING]
    read = policies.poll(1)
    assert read is not None
    assert read.small_files.keys() == {CANARY_FILE, ANNOUNCEMENT_FILE}
    announcement = Announcement.from_json(read.small_files[ANNOUNCEMENT_FILE])
    assert announcement == Announcement(
        meeting=MEETING, names=("a.weight", "b.weight"), dtypes=("float32",) * 2, shapes=((2, 3), (4,))
    )


def test_servers_that_never_come_are_named_at_the_timeout(policies: MemoryPolicies) -> None:
    group = FakeGroup(policies)
    group.may_end.clear()
    sender, _ = publisher(policies, group, timeout_s=0.1)
    with pytest.raises(DeadlineError, match=r"weight_broadcast\.timeout = 0\.1 s for 2 workers .* version 4"):
        sender.publish(version=4, spec=SPEC, files={}, weights=weights())
    group.may_end.set()


def test_a_tensor_of_another_shape_than_announced_is_not_sent(policies: MemoryPolicies) -> None:
    group = FakeGroup(policies)
    sender, _ = publisher(policies, group)
    with pytest.raises(ValueError, match=r"b\.weight has shape \(4,\), announced was \(2, 2\)"):
        sender.publish(version=0, spec=SPEC, files={}, weights=weights(b=(2, 2)))
    assert group.events == [(0, (2, 3))]


@pytest.mark.parametrize(
    "data",
    [
        b"[]",
        b"{}",
        b'{"meeting": 3, "names": [], "dtypes": [], "shapes": []}',
        b'{"meeting": {"host": "h", "port": 1, "world_size": 2}, "names": ["a"], "dtypes": [], "shapes": [[1]]}',
        b'{"meeting": {"host": "h", "port": 1, "world_size": 2}, "names": ["a"], "dtypes": ["int8"], "shapes": [[1]]}',
        b'{"meeting": {"host": "h", "port": 1, "world_size": 2}, "names": ["a", "a"], "dtypes": ["float32", "float32"],'
        b' "shapes": [[1], [1]]}',
    ],
)
def test_a_damaged_announcement_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptError):
        Announcement.from_json(data)


def test_the_settings_choose_the_channel(tmp_path: Path) -> None:
    run = found_run(tmp_path / "run")
    settings = NcclBroadcast(
        type="nccl", format="merged", host="trainer", port=4000, timeout=0.1, inference_world_size=4
    )
    sender = open_publisher(run, **publisher_arguments(settings))
    assert isinstance(sender, NcclPolicyPublisher)
    assert sender._meeting == Meeting(host="trainer", port=4000, world_size=5)
    plain = open_publisher(run, **publisher_arguments(FilesystemBroadcast()))
    assert isinstance(plain, FilesystemPolicyPublisher)
    assert FilesystemPolicyReader(run.broadcasts, run_id=run.run_id).latest() is None
