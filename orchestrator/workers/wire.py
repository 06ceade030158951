"""What an environment's process and the orchestrator say to each other: msgpack in frames, never a pickle."""

import struct
from typing import Any

import msgspec

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = (1 << 32) - 1


class Load(msgspec.Struct, tag=True):
    """Construct the environment. Answered by Loaded."""

    env_id: str
    args: dict[str, Any]


class Dataset(msgspec.Struct, tag=True):
    """Construct a split. Answered by Prompts."""

    split: str
    hash_keys: tuple[str, ...] = ()
    """Fields that make out an example's identity; none where nobody asks for it."""
    task: str = ""
    """Stands for an example's `task` where it has none."""


class ScoreOne(msgspec.Struct, tag=True):
    """Score one completion. Answered by Scored."""

    split: str
    index: int
    completion: str


class Loaded(msgspec.Struct, tag=True):
    """The environment is there."""


class Prompts(msgspec.Struct, tag=True):
    """The prompts of a split, as chat messages."""

    prompts: list[list[dict[str, str]]]
    identities: list[str] = []
    """Of each example, where `hash_keys` were given."""


class Scored(msgspec.Struct, tag=True):
    """A completion's score."""

    reward: float
    accuracy: float
    metrics: dict[str, float]


class Raised(msgspec.Struct, tag=True):
    """User code raised."""

    reason: str
    """`env_error` or `reward_not_finite`."""
    message: str
    """Its traceback."""


Request = Load | Dataset | ScoreOne
Answer = Loaded | Prompts | Scored | Raised

_encoder = msgspec.msgpack.Encoder()


def frame(message: Request | Answer) -> bytes:
    """A message with its length before it."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body)} bytes, at most {MAX_FRAME_BYTES} can be sent; use fewer examples")
    return HEADER.pack(len(body)) + body
