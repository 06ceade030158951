"""What the orchestrator and an environment worker say to each other over ZeroMQ.

Each part of a multipart message is one of these structs as MessagePack; nothing is ever unpickled. A worker serves one
environment: it is loaded first, then asked for its prompts, then any number of rollouts run in it at a time. `rollout`
is a number that the orchestrator chooses, `call` one that counts the calls of a rollout from 0.
"""

from typing import Any

import msgspec
import zmq
import zmq.asyncio

from orchestrator.rollouts.roles import Role
from orchestrator.rollouts.state import StepError

MAX_FRAME_BYTES = 1 << 30
"""A peer that sends more is cut off."""
ALIVE_INTERVAL_S = 1.0
"""How often either side says that its event loop turns."""

ChatMessage = dict[str, Any]
"""`{"role": "tool", "content": "42"}`, with what else the model's chat template reads."""


class Load(msgspec.Struct, tag=True):
    """Construct the environment. Answered by Loaded or Raised."""

    env_id: str
    args: dict[str, Any]
    timeout_s: float
    """What a rollout's own code may take between two calls of a model."""
    memory_bytes: int | None = None
    """What the environment's code may allocate (None: as much as the machine has)."""


class Dataset(msgspec.Struct, tag=True):
    """Construct a split. Answered by Prompts or Raised."""

    split: str
    hash_keys: tuple[str, ...] = ()
    """Fields that make out an example's identity; none where nobody asks for it."""
    task: str = ""
    """Stands for an example's `task` where it has none."""


class Sampled(msgspec.Struct, tag=True):
    """Answers Sample and Ask."""

    rollout: int
    call: int
    text: str
    """Without control tokens."""
    finish_reason: str
    num_tokens: int
    num_prompt_tokens: int = 0
    tokens: list[tuple[str, float]] = []
    """Each sampled token as text, control tokens included, with its log-probability; only where they were asked for."""


class Run(msgspec.Struct, tag=True):
    """Roll out an episode. Answered, after calls, by Ended or Failed."""

    rollout: int
    split: str
    index: int
    prompt: list[dict[str, str]]
    """Of the example, which must be what the worker finds at `index`."""
    seed: int | None
    score: bool = True
    """Whether the rubric is asked; otherwise rewards are 0."""
    answer: Sampled | None = None
    """To the rollout's first call, where it was sampled in advance together with the others of its group."""


class Cancel(msgspec.Struct, tag=True):
    """End a rollout that nobody waits for any more. Not answered."""

    rollout: int


class Stored(msgspec.Struct, tag=True):
    """Answers Store: `add` with the id, `sample` with a list of [id, data], `size` with a number, `set_weight` with
    whether the artifact is still there."""

    rollout: int
    call: int
    value: Any


class Refused(msgspec.Struct, tag=True):
    """Answers a call that comes to nothing."""

    rollout: int
    call: int
    reason: str
    """`context_full`, or `failed`."""
    message: str


class Loaded(msgspec.Struct, tag=True):
    """The environment is there."""

    single_turn: bool
    """Each rollout is one answer to its prompt."""
    roles: list[Role]
    """Of all its episodes."""
    stores: dict[str, int]
    """Artifact stores by name, with the number of artifacts that each may hold."""


class Prompts(msgspec.Struct, tag=True):
    """The prompts of a split, as chat messages."""

    prompts: list[list[dict[str, str]]]
    identities: list[str]
    """Of each example, where `hash_keys` were given."""
    solutions: list[str]
    """Each example's own `solution`; none where no example has one."""


class Raised(msgspec.Struct, tag=True):
    """Constructing the environment or a split raised."""

    message: str
    """Its traceback."""


class Sample(msgspec.Struct, tag=True, kw_only=True):
    """A role's turn: sample an answer that is trained. Answered by Sampled or Refused."""

    rollout: int = -1
    call: int = -1
    role: str
    conversation: int
    """Which of the rollout's conversations goes on; a number that was not used before begins one."""
    messages: list[ChatMessage]
    """What is new in it since its newest answer."""
    tools: list[dict[str, Any]] | None = None
    """What may be called, in the OpenAI format; only where a conversation begins."""
    max_tokens: int | None = None
    """None: the role's."""
    temperature: float | None = None
    """None: the role's. In an evaluation that of the evaluation."""
    raw: bool = False
    """The messages' texts, one after the other, are the prompt, without a chat template."""
    logprobs: bool = False
    """Whether the answer is to have its tokens."""


class Ask(msgspec.Struct, tag=True, kw_only=True):
    """An answer of our own servers that is not trained. Answered by Sampled or Refused."""

    rollout: int = -1
    call: int = -1
    model: str
    """`base` or `policy`."""
    messages: list[ChatMessage]
    temperature: float
    max_tokens: int | None = None


class Store(msgspec.Struct, tag=True, kw_only=True):
    """An operation on an artifact store. Answered by Stored or Refused."""

    rollout: int = -1
    call: int = -1
    store: str
    operation: str
    """`add` (data, weight), `sample` (num, weighted, replace), `set_weight` (id, weight) or `size` ()."""
    arguments: dict[str, Any]


class StepMarks(msgspec.Struct):
    """What the environment says of one call of a role."""

    call: int
    error: StepError | None = None
    observed: list[ChatMessage] | None = None
    """The state in which it acted, as messages that tell all of it; None: only the conversation tells."""


class Outcome(msgspec.Struct):
    """What a rollout came to, with those that it spawned; its tokens never leave the orchestrator."""

    steps: list[StepMarks]
    """In order; calls that belong to children are in theirs."""
    rewards: dict[str, float]
    """By role."""
    accuracy: float
    metrics: dict[str, float]
    extras: dict[str, Any]
    context_full: bool
    """Ended by the episode because the context was full."""
    children: "list[Outcome]"


class Ended(msgspec.Struct, tag=True):
    """A rollout is over and scored."""

    rollout: int
    outcome: Outcome


class Failed(msgspec.Struct, tag=True):
    """A rollout has come to nothing."""

    rollout: int
    reason: str
    """`env_error`, `env_timeout`, `env_memory`, `reward_not_finite`, or `context_full` (before the first answer)."""
    message: str


class Alive(msgspec.Struct, tag=True):
    """The heartbeat: the event loop of who sends it turns."""

    spent: bool = False
    """Code that cannot be ended holds so much of the worker that it should be replaced."""


class Gone(msgspec.Struct, tag=True):
    """Said by an environment server of a worker that has ended, or by an orchestrator that takes its leave."""

    how: str


Call = Sample | Ask | Store
Reply = Sampled | Stored | Refused
ToWorker = Load | Dataset | Run | Cancel | Sampled | Stored | Refused | Alive | Gone
FromWorker = Loaded | Prompts | Raised | Sample | Ask | Store | Ended | Failed | Alive | Gone

_encoder = msgspec.msgpack.Encoder()
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
ALIVE, GONE = _encoder.encode(Alive()), _encoder.encode(Gone(how=""))


def encode(message: ToWorker | FromWorker) -> bytes:
    """One part. Raises ValueError where it is too large."""
    data = _encoder.encode(message)
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(data)} bytes, at most {MAX_FRAME_BYTES} can be sent; use fewer examples")
    return data


def encode_checked(message: FromWorker) -> bytes:
    """As `encode`, for what user code has put values into. Raises ValueError where one has another type than is
    expected in its place."""
    try:
        data = encode(message)
        decode_from_worker(data)
    except (msgspec.MsgspecError, TypeError, OverflowError, RecursionError, UnicodeEncodeError) as error:
        raise ValueError(f"a {type(message).__name__} of this rollout holds what cannot be sent: {error}") from None
    return data


def open_socket(kind: int, context: "zmq.asyncio.Context | None" = None) -> zmq.asyncio.Socket:
    """A socket of one of the two ends, not yet connected or bound."""
    socket: zmq.asyncio.Socket = (context or zmq.asyncio.Context.instance()).socket(kind)
    socket.set_hwm(0)
    socket.linger = 200
    socket.maxmsgsize = MAX_FRAME_BYTES
    socket.ipv6 = True
    return socket
