"""The messages between the orchestrator and an environment worker, over ZeroMQ.

A frame is a list of these structs as MessagePack, what is said at one time; nothing is ever unpickled. A worker serves
one environment: it is loaded first, then asked for its prompts, then any number of rollouts run in it at a time.
"""

from typing import Any

import msgspec
import zmq
import zmq.asyncio
from grpo.orchestrator.rollouts.players import PlayerId, Pool
from grpo.orchestrator.rollouts.records import check_numbers
from grpo.orchestrator.rollouts.roles import Role
from grpo.orchestrator.rollouts.state import StepError

PROTOCOL = 4
"""To be raised with each change of what is said here."""
MAX_FRAME_BYTES = 1 << 31
"""A peer that sends more is cut off."""
MAX_USER_BYTES = 1 << 26
"""The longest message with values of user code."""
ALIVE_INTERVAL_S = 1.0
"""The interval of heartbeats, of both sides."""

SILENCE_LIMIT_S = 10.0
"""An orchestrator, or an environment server, that says nothing for so long is gone."""

ChatMessage = dict[str, Any]
"""`{"role": "tool", "content": "42"}`, with what else the model's chat template reads."""


class Job(msgspec.Struct, tag=True, kw_only=True):
    """A request of the orchestrator's, what a worker answers to it, or a call on the way there."""

    job: int = -1
    """A number that the orchestrator chooses for each request."""


class Load(Job, kw_only=True):
    """Construct the environment. Answered by EnvironmentInfo or Failed."""

    env_id: str
    args: dict[str, Any]
    timeout_s: float
    """A rollout's own code may take so long between two calls of a model."""
    memory_bytes: int | None = None
    """The environment's code may allocate so much (None: as much as the machine has)."""


class EnvironmentInfo(Job, kw_only=True):
    """The environment is there."""

    single_turn: bool
    """Each rollout is one answer to its prompt."""
    roles: list[Role]
    """The roles of all its episodes."""
    stores: dict[str, int]
    """Artifact stores by name, with the number of artifacts that each may hold."""
    pools: dict[str, Pool] = {}
    """Opponents by name."""


class LoadDataset(Job, kw_only=True):
    """Construct a split, and send a part of it. Answered by Prompts or Failed."""

    split: str
    begin: int = 0
    """The first example of the part."""
    hash_keys: tuple[str, ...] = ()
    """Fields that make out an example's identity; none where nobody asks for it."""
    task: str = ""
    """Stands for an example's `task` where it has none."""


class Prompts(Job, kw_only=True):
    """The prompts of some of a split's examples, from `begin` on."""

    num_examples: int
    """Of the whole split."""
    prompts: "Values"
    """Each example's messages."""
    identities: bytes
    """Each example's identity, 24 hexadecimal digits, if `hash_keys` were given."""
    solutions: "Values"
    """Each example's own `solution`; empty where it has none."""


class Values(msgspec.Struct, kw_only=True):
    """Values as MessagePack, one after the other: who passes them on need not look at them."""

    data: bytes
    lengths: bytes
    """Bytes of each, as unsigned 32-bit integers, little-endian."""


class Call(Job, kw_only=True):
    """A call of a rollout to the orchestrator, or the reply."""

    call: int = -1
    """Counts the calls of a rollout, from 0. An answer gets that of its call, as `job`, where it is sent."""


class Sampled(Call, kw_only=True):
    """Answers Sample and Ask."""

    text: str
    """Without control tokens."""
    finish_reason: str
    num_tokens: int
    num_prompt_tokens: int = 0
    opening: str = ""
    """The text by which the model's chat template opens the policy's turn, before the answer."""
    tokens: list[tuple[str, float]] = []
    """Each sampled token as text, control tokens included, with its log-probability; only where they were asked for."""


class StoreReply(Call, kw_only=True):
    """Answers StoreCall, with what ArtifactStore.operate returns, Draw, with `name` and `digest` of a player,
    ScoreAnswers, and Delay."""

    value: Any


class CallRefused(Call, kw_only=True):
    """Answers a call that fails."""

    reason: str
    """`context_full`, or `failed`."""
    message: str


class Sample(Call, kw_only=True):
    """A role's turn: sample an answer that is trained. Answered by Sampled or CallRefused."""

    role: str
    rollout: int = 0
    """The rollout of the tree that calls: 0 for the root, another number for each that was spawned."""
    conversation: int
    """Which conversation goes on; a number that was not used before begins one."""
    messages: list[ChatMessage]
    """The messages since its newest answer."""
    tools: list[dict[str, Any]] | None = None
    """The tools that may be called, in the OpenAI format; only where a conversation begins."""
    max_tokens: int | None = None
    """None: the role's."""
    temperature: float | None = None
    """None: the role's. In an evaluation that of the evaluation."""
    raw: bool = False
    """The messages' texts, one after the other, are the prompt, without a chat template."""
    logprobs: bool = False
    """True if the answer is to have its tokens."""
    drawn: int | None = None
    """The Draw whose player answers, untrained; None for the policy."""


class Draw(Call, kw_only=True):
    """Draw an opponent. Answered by StoreReply or CallRefused."""

    pool: str
    """One of the environment's, `base` or `newest`."""
    by: str
    """One of `players.RULES`."""
    per_game: bool
    """Each game draws for itself, and not each group."""
    rollout: int = 0
    """As in Sample."""
    adapter: str | None = None
    """Of `newest`."""


class Ask(Call, kw_only=True):
    """An answer of our own servers that is not trained. Answered by Sampled or CallRefused."""

    model: str
    """`base` or `policy`."""
    messages: list[ChatMessage]
    temperature: float
    max_tokens: int | None = None


class ScoreAnswers(Call, kw_only=True):
    """How likely a role's policy gives each of several answers to each of N prompts. Answered by StoreReply, with the
    log-probabilities in nats as [N] lists, or CallRefused."""

    role: str
    prompts: list[list[ChatMessage]]
    """[N]"""
    answers: list[list[str]]
    """[N], the answers to each prompt."""


class StoreCall(Call, kw_only=True):
    """An operation on an artifact store. Answered by StoreReply or CallRefused."""

    store: str
    operation: str
    arguments: dict[str, Any]


class Delay(Call, kw_only=True):
    """The rollout begins to wait for a reward that comes later. Answered by StoreReply."""


class Withdraw(Call, kw_only=True):
    """Nobody has received the answer to the Sample that is this `call`, and nobody waits for it any more: it is not
    trained. Its answer is not waited for either."""


class RunEpisode(Job, kw_only=True):
    """Roll out an episode. Answered, after calls, by Outcome or Failed."""

    split: str
    index: int
    prompt: list[dict[str, str]]
    """The example's prompt, which must be what the worker finds at `index`."""
    seed: int | None
    score: bool = True
    """False if the rubric is not asked, and rewards are 0."""


class Score(Job, kw_only=True):
    """Score single answers to one prompt. Each answer is a job: `job` is the number of the first, and the numbers of
    the others follow. Each job is answered, after calls, by Outcome or Failed."""

    split: str
    index: int
    prompt: list[dict[str, str]]
    """The example's prompt, which must be what the worker finds at `index`."""
    texts: list[str]
    """The answers, without control tokens."""
    opening: str = ""
    """The text by which the model's chat template opens the policy's turn, before the answer."""
    finish_reasons: list[str]
    num_tokens: list[int]
    seeds: list[int | None]
    """One for each answer, as of the two lists before."""
    trial: bool = False
    """True for a trial: can an answer be scored? See `grpo.orchestrator.workers.trial`."""


class Mark(msgspec.Struct, kw_only=True):
    """The environment's remarks on one answer of the policy."""

    error: StepError | None = None
    observed: list[ChatMessage] | None = None
    """The state in which the policy acted, as messages that tell all of it without the conversation."""


class Outcome(Job, kw_only=True):
    """A rollout is over and scored. The orchestrator has its steps."""

    rollout: int = 0
    """The rollout of the tree, as in Sample."""
    rewards: dict[str, float]
    """Rewards by role."""
    accuracy: float = 0.0
    metrics: dict[str, float] = {}
    extras: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    """The example's fields other than its prompt, for traces."""
    truncated: bool = False
    """The episode ended because the context was full."""
    num_answers: int = 0
    """Answers of the policy that have arrived."""
    marks: dict[int, Mark] = {}
    """Remarks by call."""
    players: dict[str, PlayerId] = {}
    """Opponents by role."""
    children: "list[Outcome]" = []
    """The outcomes of the rollouts that it spawned; they have no `job`."""

    def __post_init__(self) -> None:
        check_numbers("a rollout", self.rewards, self.metrics, self.accuracy)


class Failed(Job, kw_only=True):
    """A job has failed."""

    reason: str
    """`env_error`, `env_timeout`, `env_memory`, `reward_not_finite`, `reward_too_large`, or `context_full` (before the
    first answer)."""
    message: str


class Cancel(Job, kw_only=True):
    """End a job that nobody waits for any more. Not answered."""


class Alive(msgspec.Struct, tag=True):
    """The heartbeat: the event loop of who sends it turns. It is the first thing that two ends say to each other."""

    protocol: int = 0
    """PROTOCOL of who says it; 0 of those who did not know of it yet."""


class ServerAlive(msgspec.Struct, tag=True):
    """An environment server's answer to an orchestrator's heartbeat. It says nothing about the worker."""


class Left(msgspec.Struct, tag=True):
    """An environment server says that a worker has ended, or an orchestrator that it leaves."""

    how: str = ""
    killed: bool = False
    """The worker was ended by a signal, or with its server."""


AnyCall = Sample | Draw | Ask | ScoreAnswers | StoreCall | Delay | Withdraw
Reply = Sampled | StoreReply | CallRefused
Answer = EnvironmentInfo | Prompts | Outcome | Failed
ToWorker = Load | LoadDataset | RunEpisode | Score | Cancel | Sampled | StoreReply | CallRefused | Alive | Left
FromWorker = (
    EnvironmentInfo
    | Prompts
    | Outcome
    | Failed
    | Sample
    | Draw
    | Ask
    | ScoreAnswers
    | StoreCall
    | Delay
    | Withdraw
    | Alive
    | ServerAlive
    | Left
)

_encoder = msgspec.msgpack.Encoder()
_greetings = msgspec.msgpack.Decoder(list[Alive])
_decode = msgspec.msgpack.Decoder(FromWorker).decode
decode_to_worker = msgspec.msgpack.Decoder(list[ToWorker]).decode
decode_from_worker = msgspec.msgpack.Decoder(list[FromWorker]).decode
"""A frame's messages."""


def encode(message: ToWorker | FromWorker) -> bytes:
    """One message, for a frame. Raises ValueError where it is too large."""
    data, most = _encoder.encode(message), MAX_FRAME_BYTES // 2
    if len(data) > most:
        raise ValueError(f"a message of {len(data)} bytes, at most {most} can be sent; use fewer examples")
    return data


def frame_of(*messages: bytes) -> bytes:
    """Messages that are sent together."""
    return _encoder.encode([msgspec.Raw(message) for message in messages])


ALIVE, SERVER_ALIVE, LEFT = (frame_of(encode(one)) for one in (Alive(protocol=PROTOCOL), ServerAlive(), Left()))


def protocol_of(frame: bytes) -> int | None:
    """Returns the protocol of the end that sent this frame; None if it is no greeting."""
    try:
        [said] = _greetings.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return said.protocol


def other_protocol(theirs: int) -> str:
    """Returns what is said of a worker whose other end speaks another protocol."""
    return f"speaks protocol {PROTOCOL}, and the other end {theirs}; install the same release of grpo on both"


def encode_checked(message: FromWorker) -> bytes:
    """Returns a message with values of user code as bytes. Raises ValueError if a value does not have the expected
    type, and if the message is too long."""
    try:
        data = encode(message)
        _decode(data)
    except (msgspec.MsgspecError, TypeError, OverflowError, RecursionError, UnicodeEncodeError) as error:
        raise ValueError(f"a {type(message).__name__} of this rollout holds what cannot be sent: {error}") from None
    if len(data) > MAX_USER_BYTES:
        raise ValueError(f"a {type(message).__name__} of this rollout has {len(data)} bytes, at most {MAX_USER_BYTES}")
    return data


def open_socket(kind: int, context: "zmq.asyncio.Context | None" = None) -> zmq.asyncio.Socket:
    """A socket of one of the two ends, not yet connected or bound."""
    socket: zmq.asyncio.Socket = (context or zmq.asyncio.Context.instance()).socket(kind)
    socket.set_hwm(0)
    socket.linger = 200
    socket.maxmsgsize = MAX_FRAME_BYTES
    socket.ipv6 = True
    return socket
