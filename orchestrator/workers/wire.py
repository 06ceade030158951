"""What an environment's process and the orchestrator say to each other: msgpack in frames, never a pickle."""

import struct
from typing import Any

import msgspec

HEADER = struct.Struct("<I")
RUNNING_VAR = "GRPO_RUNNING_FD"
"""A process's environment variable with a descriptor of 8 bytes, where it keeps what `RUNNING` packs."""
RUNNING = struct.Struct("<q")
"""The number of the rollout whose code runs; NOBODY where none does."""
NOBODY = -1
BEAT_S = 0.25
MAX_FRAME_BYTES = (1 << 32) - 1


class Load(msgspec.Struct, tag=True):
    """Construct the environment. Answered by Loaded."""

    env_id: str
    args: dict[str, Any]
    episodes: bool = False
    """From then on the process rolls out episodes, many at a time, and takes no other requests than theirs."""
    memory_bytes: int | None = None
    """What the environment's code may allocate (None: as much as the machine has)."""


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


class RoleInfo(msgspec.Struct):
    """A role as the environment declares it."""

    id: str
    temperature: float | None = None
    """None: the run's."""
    max_tokens: int | None = None
    """None: the run's."""


class Loaded(msgspec.Struct, tag=True):
    """The environment is there."""

    episodic: bool = False
    """Its rollouts are episodes; otherwise they are single answers, which its rubric scores."""
    roles: list[RoleInfo] = []
    """Of all its episodes."""
    stores: dict[str, int] = {}
    """Artifact stores by name, with the number of artifacts that each may hold."""


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


# --- episodes: many at a time; `rollout` and `call` are numbers that the one who begins something chooses ---

ChatMessage = dict[str, Any]
"""`{"role": "tool", "content": "42"}`, with what else the model's chat template reads."""


class Begin(msgspec.Struct, tag=True):
    """Roll out an episode. Answered, after calls, by Ended or Failed."""

    rollout: int
    split: str
    index: int
    prompt: list[dict[str, str]]
    """Of the example, which must be what the process finds at `index`."""
    seed: int | None
    score: bool = True
    """Whether the rubric is asked; otherwise rewards are 0."""


class Cancel(msgspec.Struct, tag=True):
    """End a rollout. Answered by Failed with the reason `cancelled`, unless it has ended already."""

    rollout: int


class Called(msgspec.Struct, tag=True):
    """A role's turn: sample an answer that is trained. Answered by Sampled or Refused."""

    rollout: int
    call: int
    role: str
    conversation: int
    """Which of the rollout's conversations goes on; a number that was not used before begins one."""
    messages: list[ChatMessage]
    """What is new in it since its newest answer."""
    tools: list[dict[str, Any]] | None = None
    """What may be called, in the OpenAI format; only where a conversation begins."""
    max_tokens: int | None = None
    """None: the role's."""


class Asked(msgspec.Struct, tag=True):
    """An answer of our own servers that is not trained. Answered by Sampled or Refused."""

    rollout: int
    call: int
    model: str
    """`base` or `policy`."""
    messages: list[ChatMessage]
    temperature: float
    max_tokens: int | None = None


class Sampled(msgspec.Struct, tag=True):
    """What a model said."""

    call: int
    text: str
    """Without control tokens."""
    finish_reason: str
    num_tokens: int


class Refused(msgspec.Struct, tag=True):
    """A call that comes to nothing."""

    call: int
    reason: str
    """`context_full`, or `failed`."""
    message: str


class Stored(msgspec.Struct, tag=True):
    """An operation on an artifact store. Answered by StoreAnswer or Refused."""

    rollout: int
    call: int
    store: str
    operation: str
    """`add` (data, weight), `sample` (num, weighted, replace), `set_weight` (id, weight) or `size` ()."""
    arguments: dict[str, Any]


class StoreAnswer(msgspec.Struct, tag=True):
    """What came of it: `add` the id, `sample` a list of [id, data], `size` a number, `set_weight` whether the artifact
    is still there."""

    call: int
    result: Any


class MarkedError(msgspec.Struct):
    """An error that the environment saw in a step."""

    error_kind: str
    hint_template_key: str
    message: str = ""


class PlayedStep(msgspec.Struct):
    """A step of a rollout: one call of a role."""

    call: int
    error: MarkedError | None = None
    observed: list[ChatMessage] | None = None
    """The state in which it acted, as messages that tell all of it; None: only the conversation tells."""


class Played(msgspec.Struct):
    """What a rollout came to, with those that it spawned."""

    steps: list[PlayedStep]
    """In order; calls that belong to children are in theirs."""
    rewards: dict[str, float]
    """By role."""
    accuracy: float
    metrics: dict[str, float]
    extras: dict[str, Any] = {}
    truncated: bool = False
    """Ended because the context was full."""
    children: "list[Played]" = []


class Ended(msgspec.Struct, tag=True):
    """A rollout is over and scored."""

    rollout: int
    played: Played


class Failed(msgspec.Struct, tag=True):
    """A rollout has come to nothing."""

    rollout: int
    reason: str
    """`env_error`, `env_memory`, `reward_not_finite`, `context_full` (before the first answer), or `cancelled`."""
    message: str


class Beat(msgspec.Struct, tag=True, frozen=True):
    """Sent by a thread of its own every `BEAT_S`, whatever the environment's code does. Two that are equal, and in
    which a rollout runs, tell that its code has not let go in between."""

    running: int
    """The rollout whose code runs; NOBODY where none does."""
    num_steps: int
    """How often code of any rollout has been entered."""


Request = Load | Dataset | ScoreOne | Begin | Cancel | Sampled | Refused | StoreAnswer
Answer = Loaded | Prompts | Scored | Raised | Called | Asked | Stored | Ended | Failed | Beat

_encoder = msgspec.msgpack.Encoder()


def frame(message: Request | Answer) -> bytes:
    """A message with its length before it."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body)} bytes, at most {MAX_FRAME_BYTES} can be sent; use fewer examples")
    return HEADER.pack(len(body)) + body
