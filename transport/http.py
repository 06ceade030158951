"""The bodies of `grpo-infer`'s own routes and of their answers, for both ends: JSON, or MessagePack where a request
asks for it (`Accept: application/msgpack`)."""

from typing import Annotated, Literal

import msgspec
import numpy as np
from grpo.transport.records import Float32, Int32, Natural, Record, array_of, require
from msgspec import Meta

MAX_TEMPERATURE = 100
Temperature = Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)]
MAX_TOP = 20
"""Likeliest tokens that a server names for a position; vLLM's own bound."""
MIN_TEMPERATURE = 0.01
"""vLLM raises lower ones to this silently; 0 is greedy."""
NO_SLOTS = "slots"
"""Type of the error where versions that are live hold too many of the server's slots for one more."""
OTHER_SNAPSHOT = "other_snapshot"
"""Type of the error where a version is published with other files than the request names."""


class LoadRequest(Record, frozen=True, kw_only=True):
    """POST /policy/load: makes a published version live. Answered by `LoadReport`."""

    run_id: str
    version: Natural
    alias: str | None = None
    """One more model name for vLLM's own routes."""
    rank_offset: Annotated[int, Meta(ge=1)] = 1
    """Rank of this server's first worker, where weights are broadcast; the trainer is rank 0."""
    snapshot: str | None = None
    """Digest of the snapshot that is meant; another one is refused. None: whichever is published."""


class CanaryFigures(Record, frozen=True, kw_only=True):
    """How far the server's log-probabilities of the canary are from the trainer's, in nats."""

    max_abs: float
    mean_abs: float
    base_max_abs: float
    """Of the base instead of the version, on the same tokens: what two right implementations differ by."""
    base_mean_abs: float
    tolerance: float
    """Largest allowed `gap`."""
    measure: Literal["max_abs", "mean_abs"] = "mean_abs"
    """Which of the two figures the tolerance is for."""

    @property
    def gap(self) -> float:
        """The figure that is compared with the tolerance."""
        return self.max_abs if self.measure == "max_abs" else self.mean_abs

    @property
    def base_gap(self) -> float:
        """The same of the base."""
        return self.base_max_abs if self.measure == "max_abs" else self.base_mean_abs

    @property
    def agrees(self) -> bool:
        """Whether the two serve the same policy."""
        return self.gap <= self.tolerance


class LoadReport(Record, frozen=True, kw_only=True):
    """How a version became live on one server."""

    version: int
    name: str
    snapshot: str
    """Digest of the version's policy files."""
    canary: CanaryFigures
    noise: CanaryFigures | None = None
    """Figures with the version's noise; None for a version without noise."""
    adapters: dict[str, CanaryFigures] = msgspec.field(default_factory=dict)
    """Figures of the version's other adapters, by name; empty for a version with one adapter."""
    load_s: float
    """Seconds for checking and loading."""
    canary_s: float
    """Seconds for scoring the canary."""


class UnloadRequest(Record, frozen=True, kw_only=True):
    """POST /policy/unload: routes no more to a version. Answered by `Unloaded`."""

    version: int


class Unloaded(Record, frozen=True, kw_only=True):
    """A version that takes no new requests."""

    version: int
    in_flight: int
    """Requests that still run under it."""


class GenerateRequest(Record, frozen=True, kw_only=True):
    """POST /policy/generate: samples `n` answers to one prompt. Answered by `Generated`."""

    version: int | None
    """None: the base model."""
    prompt_token_ids: Annotated[list[int], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)]
    n: Annotated[int, Meta(ge=1, le=1024)] = 1
    min_tokens: Natural = 0
    temperature: Temperature = 1.0
    """0: greedy."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    stop: list[Annotated[str, Meta(min_length=1)]] = msgspec.field(default_factory=list)
    """Texts that end an answer, whose last token is the one that completes such a text."""
    ignore_eos: bool = False
    """Whether the model's end token is a token like any other."""
    top_k: Natural = 0
    """Tokens are drawn from the k likeliest; 0: from all. Log-probabilities are without this bound and the next."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Tokens are drawn from the likeliest ones that have this probability together."""
    num_top: Annotated[int, Meta(ge=0, le=MAX_TOP)] = 0
    """How many of the likeliest tokens are named beside each sampled one."""
    cache_salt: str | None = None
    noisy: bool = False
    """Under the version's noise on its norm weights, where it has any."""
    follow: bool = False
    """Under the newest version instead, and those that become live while the request runs."""
    adapter: str | None = None
    """None: the version's first or only one."""

    def __post_init__(self) -> None:
        greedy = self.temperature == 0
        _check_temperature(self.temperature, greedy=greedy)
        require(not (greedy and self.n > 1), f"temperature 0 gives {self.n} equal answers; ask for n = 1")
        require(self.min_tokens <= self.max_tokens, f"min_tokens is above max_tokens = {self.max_tokens}")
        of_base = self.version is None and (self.follow or self.adapter is not None)
        require(not of_base, "version is null, and the base model has neither followers nor an adapter; name a version")
        plain = not (self.stop or self.is_restricted or self.num_top)
        require(plain or not self.follow, "follow is for requests without stop, top_k, top_p and num_top")

    @property
    def is_restricted(self) -> bool:
        """Whether tokens are drawn from a part of the distribution; greedy ones are the same from every part."""
        return self.temperature != 0 and (self.top_k > 0 or self.top_p < 1)


class Top(Record, frozen=True, kw_only=True):
    """The likeliest tokens of each of L positions, the likeliest first: ids and log-probabilities [L][num_top]."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]


class Choice(Record, frozen=True, kw_only=True, eq=False):
    """One answer: ids [k], log-probabilities [k] in nats at the request's temperature, and why it ended. Made of lists,
    it has arrays."""

    token_ids: Int32
    logprobs: Float32
    finish_reason: str
    """`stop`, `length`; `superseded` where the engine is to continue it under another version."""
    stop_reason: int | None = None
    """The token id that ended the answer (it is also the last of `token_ids`); None otherwise."""
    versions: tuple[tuple[int, int], ...] | None = None
    """Where a request follows: runs of (version, number of tokens), which sum to k; versions ascend."""
    seed: int | None = None
    """The seed that it was sampled with; of an answer in parts, of the last one. None: the engine's own randomness."""
    mark: int | None = None
    """A random number of this answer's own, by which it is known if it comes twice."""
    server: str = ""
    """The server that sampled it, as the client that asked calls it; empty on the wire."""
    top: Top | None = None
    """The likeliest tokens beside each of `token_ids`, where `num_top` asks for them."""

    def __post_init__(self) -> None:
        for name, kind in (("token_ids", Int32), ("logprobs", Float32)):
            if not isinstance(values := getattr(self, name), np.ndarray):
                msgspec.structs.force_setattr(self, name, array_of(kind, values))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Choice):
            return NotImplemented
        pairs = ((getattr(self, name), getattr(other, name)) for name in self.__struct_fields__)
        return all(np.array_equal(one, its) if isinstance(one, np.ndarray) else one == its for one, its in pairs)

    __hash__ = object.__hash__


class Generated(Record, frozen=True, kw_only=True):
    """The answers to a prompt."""

    version: int | None
    choices: list[Choice]


class ScoreRequest(Record, frozen=True, kw_only=True):
    """POST /policy/score: log-probabilities of a given sequence. Answered by `Scored`."""

    version: int | None
    """None: the base model."""
    token_ids: Annotated[list[int], Meta(min_length=2)]
    temperature: Temperature = 1.0
    """Temperature that divides the logits."""
    noisy: bool = False
    adapter: str | None = None
    num_top: Annotated[int, Meta(ge=0, le=MAX_TOP)] = 0
    """How many of the likeliest tokens are named beside each scored one."""

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)
        require(self.version is not None or self.adapter is None, "adapter: the base model has none; name a version")


class ScoreAnswersRequest(Record, frozen=True, kw_only=True):
    """POST /policy/score_answers: log-probabilities of several possible answers to each of N prompts. Answered by
    `ScoredAnswers`."""

    version: int | None
    """None: the base model."""
    prompts: list[Annotated[list[int], Meta(min_length=1)]]
    """[N] token ids."""
    answers: list[Annotated[list[Annotated[list[int], Meta(min_length=1)]], Meta(min_length=1)]]
    """[N] the answers to each prompt, as token ids."""
    temperature: Temperature = 1.0
    """Temperature that divides the logits."""
    adapter: str | None = None

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)
        require(self.version is not None or self.adapter is None, "adapter: the base model has none; name a version")
        num, given = len(self.prompts), len(self.answers)
        require(num == given, f"{given} lists of answers for {num} prompts; give one for each")


class ScoredAnswers(Record, frozen=True, kw_only=True):
    """The scores of answers."""

    version: int | None
    logprobs: list[list[float]]
    """[N], for each prompt those of its answers in nats: the sum over an answer's tokens."""


def _check_temperature(temperature: float, *, greedy: bool = False) -> None:
    message = f"temperature is {temperature}, expected 0 (greedy, where tokens are sampled) or at least"
    require(greedy or temperature >= MIN_TEMPERATURE, f"{message} {MIN_TEMPERATURE}")


class Scored(Record, frozen=True, kw_only=True):
    """The scores of a sequence."""

    version: int | None
    logprobs: list[float]
    """[L - 1] in nats; element i is that of token i + 1."""
    top: Top | None = None
    """The likeliest tokens in the places of tokens 1 … L-1, where `num_top` asks for them."""


class ServerLoad(Record, frozen=True, kw_only=True):
    """How much an engine has to do, as its scheduler saw it after its newest step. Sequences, not requests: one with
    n = 16 counts 16 times. Example: ``ServerLoad(num_running=48, num_waiting=3, kv_use=0.62)``"""

    num_running: int
    """Sequences that it decodes."""
    num_waiting: int
    """Sequences that wait for a place, those that it has pushed out again included."""
    kv_use: float
    """Share of the KV cache in use, 0 to 1; of the fullest one, where there are several."""


class ServerInfo(Record, frozen=True, kw_only=True):
    """GET /policy/info: what a server says about itself."""

    base_model: str
    """The base model's identity."""
    max_model_len: int
    max_lora_rank: int
    model: str = ""
    vocab_size: int = 0
    kinds: list[str] = msgspec.field(default_factory=lambda: ["adapter"])
    """Kinds of policy versions that it can serve."""
    num_workers: int = 1
    """GPUs that it computes on."""
    run_id: str | None = None
    """The run whose versions it serves."""
    live: dict[int, str] = msgspec.field(default_factory=dict)
    """Versions of that run that it serves, with their snapshots' digests."""
    in_flight: dict[int, int] = msgspec.field(default_factory=dict)
    """Requests that run now, by version; those of versions that take no new ones included."""
    num_slots: int | None = None
    """Adapters that it holds at once; None where it serves one version alone."""
    load: ServerLoad | None = None
    """How much it has to do; None where it does not say."""
    asleep: bool | None = None
    """Whether it sleeps; None where it cannot."""
