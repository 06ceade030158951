"""A teacher behind HTTP, on a grpo-infer (POST /policy/score) or any vLLM server (POST /v1/completions with
`prompt_logprobs`): a bounded number of requests at a time, retries with growing pauses, a deadline for each sample.

One that cannot be reached, itself or behind its proxy, is tried until the deadline, however often that is: it may be
starting again, samples that fail cost their rollouts, and the run must not outpace its teacher.

vLLM's own routes score at temperature 1 only: they take `prompt_logprobs` before any processing, temperature included.
log softmax(z / t) needs the sum of exp(z / t) over the whole vocabulary, which these do not give, and scoring at 1 what
was sampled at t would teach a student that equals its teacher to become another.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import numpy as np
import tenacity

from configs.auxiliary import TeacherSettings
from orchestrator.background import in_thread
from orchestrator.endpoints import CONNECT_TIMEOUT_S, MAX_ECHO, BoundedTransport, TooLong
from orchestrator.renderer import load_tokenizer
from orchestrator.teacher.scoring import FailureReason, TeacherFailure, checked
from transport.records import Float32, Int32

BYTES_PER_TOKEN, BYTES_BESIDE = 1024, 1 << 20
"""What an answer may have."""
TRY_TIMEOUT_S = 60.0
RETRIES = 4
"""After failures that may pass; one that is unreachable is not counted."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0
TRIAL_TOKENS = 4
_PASSING = frozenset[FailureReason]({"unreachable", "timeout", "error"})
A = TypeVar("A")


class _Score(msgspec.Struct):
    version: int | None
    logprobs: list[float]


class _Info(msgspec.Struct):
    max_model_len: int


class _TokenLogprob(msgspec.Struct):
    logprob: float | None


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[int, _TokenLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None


class _Completed(msgspec.Struct):
    choices: list[_Choice]


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class ServedTeacher:
    """One server or several that serve the same teacher."""

    def __init__(self, settings: TeacherSettings, *, api_key: str | None, seq_len: int, ours: bool = False) -> None:
        """`seq_len`: of the longest sample. `ours`: whether the servers are grpo-infer. Raises ValueError without an
        address."""
        name, client = settings.model.name, settings.client
        if name is None or not client.base_url:
            raise ValueError(
                f"teacher_model.model.name is {name} and client.base_url of it is {client.base_url}, expected both: "
                "`grpo` starts a teacher and fills in its address, grpo-orch alone must be given one"
            )
        self.model, self.ours, self._deadline_s = name, ours, client.timeout
        self.servers = [url.rstrip("/").removesuffix("/v1") for url in client.base_url]
        self.longest: int | None = None
        """Tokens of the longest sample that all servers can score; None where they do not tell."""
        self._num_in_flight: Counter[str] = Counter()
        self._transport = BoundedTransport(
            api_key=api_key, timeout_s=TRY_TIMEOUT_S, max_bytes=BYTES_BESIDE + BYTES_PER_TOKEN * seq_len
        )
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        self._http = httpx.AsyncClient(transport=self._transport, timeout=timeout, trust_env=False)

    @property
    def name(self) -> str:
        """The model's name, and where it is served."""
        return f"the teacher {self.model} at {', '.join(self.servers)}"

    @property
    def num_requests(self) -> int:
        """Requests that were sent, tries after failures included."""
        return self._transport.num_requests

    async def close(self) -> None:
        """Closes all connections."""
        await self._http.aclose()

    async def score(self, token_ids: Int32, temperature: float, *, adapter: int = 0) -> Float32:
        """By whichever server has failed it least and is least loaded, after as many tries as are allowed."""
        return await self._scored(self.servers, token_ids, temperature)

    async def _scored(self, servers: Sequence[str], token_ids: Int32, temperature: float) -> Float32:
        if self.longest is not None and len(token_ids) > self.longest:
            told = f"{len(token_ids)} tokens, and it scores {self.longest}; lower seq_len"
            raise TeacherFailure("too_long", f"the teacher {self.model}: {told}")
        path, body = self._request(token_ids, temperature)
        failed = Counter[str]()

        async def attempt() -> Float32:
            server = min(servers, key=lambda one: (failed[one], self._num_in_flight[one]))
            self._num_in_flight[server] += 1
            try:
                return self._read(await self._asked("POST", server, path, body), token_ids)
            except TeacherFailure as error:
                failed[server] += 1
                raise TeacherFailure(error.reason, f"the teacher {self.model} at {server}: {error}") from None
            finally:
                self._num_in_flight[server] -= 1

        return await _tried(attempt, deadline_s=self._deadline_s)

    # --- requests and answers ---

    def _request(self, token_ids: Int32, temperature: float) -> tuple[str, dict[str, Any]]:
        """Path and body. Of the one token that vLLM's completions must sample nothing is used. Raises
        TeacherFailure."""
        if self.ours:
            return "/policy/score", {"version": None, "token_ids": token_ids.tolist(), "temperature": temperature}
        if abs(temperature - 1.0) > 1e-6:
            raise TeacherFailure(
                "temperature",
                f"the teacher {self.model} scores at temperature 1 only, and these tokens were sampled at "
                f"{temperature:g}; set sampling.temperature to 1, or serve the teacher with grpo-infer",
            )
        sampled = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "return_token_ids": True}
        return "/v1/completions", {"model": self.model, "prompt": token_ids.tolist(), **sampled}

    def _read(self, data: bytes, token_ids: Int32) -> Float32:
        """[L]. Raises TeacherFailure."""
        if self.ours:
            answer = _decoded(data, _Score)
            if answer.version is not None:
                raise TeacherFailure("nonsense", f"it scored under version {answer.version}, expected its base model")
            return checked(answer.logprobs, token_ids)
        choices, ids = _decoded(data, _Completed).choices, token_ids.tolist()
        if len(choices) != 1 or (entries := choices[0].prompt_logprobs) is None:
            raise TeacherFailure("nonsense", "it gives no prompt_logprobs; only a server of vLLM's kind can teach")
        if len(entries) != len(ids) or choices[0].prompt_token_ids not in (None, ids):
            raise TeacherFailure("nonsense", "it read other tokens than it was sent; it changes what it gets")
        known = [(entry or {}).get(token) for token, entry in zip(ids[1:], entries[1:], strict=True)]
        return checked([None if one is None else one.logprob for one in known], token_ids)

    async def _asked(self, method: str, server: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """The body of an answer of 200. Raises TeacherFailure."""
        content, headers = None if body is None else msgspec.json.encode(body), {"content-type": "application/json"}
        try:
            response = await self._http.request(method, server + path, content=content, headers=headers)
        except (TooLong, httpx.InvalidURL) as error:
            raise TeacherFailure("nonsense", str(error)) from None
        except httpx.HTTPError as error:
            late = isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout)
            raise TeacherFailure("timeout" if late else "unreachable", f"{type(error).__name__}: {error}") from None
        if (status := response.status_code) == 200:
            return response.content
        passing = status >= 500 or status in (408, 425, 429)
        reason: FailureReason = "unreachable" if status in (502, 503, 504) else "error" if passing else "refused"
        raise TeacherFailure(reason, f"{path} answered {status}: {response.text[:MAX_ECHO]}")

    # --- before the run ---

    async def inspect(self, *, wait_s: float) -> None:
        """Waits for all servers, and learns which kind they are and the longest sample that all can score. Raises
        TeacherFailure where they do not serve the teacher."""
        found = [await self._inspected(server, wait_s) for server in self.servers]
        if len(kinds := {ours for ours, _ in found}) > 1:
            raise TeacherFailure("refused", f"of {self.name} some servers are grpo-infer and some are not")
        [self.ours] = kinds
        # For vLLM samples one more.
        self.longest = min((length - 1 for _, length in found if length is not None), default=None)

    async def _inspected(self, server: str, wait_s: float) -> tuple[bool, int | None]:
        """Whether a server is a grpo-infer, and how much it reads, where it tells. Waits until it is up."""

        async def attempt() -> bytes | None:
            try:
                return await self._asked("GET", server, "/policy/info")
            except TeacherFailure as error:
                if error.reason == "refused":  # no such route
                    return None
                raise

        try:
            info = await _tried(attempt, deadline_s=wait_s, retries=10**9)
        except TeacherFailure as error:
            told = f"the teacher's server {server} did not come up in {wait_s:g} s: {error}"
            raise TeacherFailure(error.reason, f"{told}; start it, or mend teacher_model.client.base_url") from None
        if info is not None:
            return True, _decoded(info, _Info).max_model_len
        models = {one.id: one for one in _decoded(await self._asked("GET", server, "/v1/models"), _Models).data}
        if self.model not in models:
            raise TeacherFailure("refused", f"{server} does not serve {self.model!r}; it serves {sorted(models)}")
        return False, models[self.model].max_model_len

    async def check_scoring(self, token_ids: Int32, temperatures: Sequence[float]) -> None:
        """Has every server score a row at each temperature. Raises TeacherFailure."""
        for server in self.servers:
            for temperature in temperatures:
                await self._scored([server], token_ids, temperature)
        self._transport.num_requests = 0


async def _tried(attempt: Callable[[], Awaitable[A]], *, deadline_s: float, retries: int = RETRIES) -> A:
    """What `attempt` gives, after further tries where its failure may pass. Raises TeacherFailure."""
    num_failed, last = 0, TeacherFailure("timeout", "nothing came")

    async def counted() -> A:
        nonlocal num_failed, last
        try:
            return await attempt()
        except TeacherFailure as error:
            num_failed += error.reason != "unreachable"
            last = error
            raise

    retrying = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(lambda e: isinstance(e, TeacherFailure) and e.reason in _PASSING),
        stop=lambda state: num_failed > retries,
        wait=tenacity.wait_random_exponential(multiplier=FIRST_PAUSE_S, max=MAX_PAUSE_S),
        reraise=True,
    )
    try:
        async with asyncio.timeout(deadline_s):
            return await retrying(counted)
    except TimeoutError:
        raise TeacherFailure(last.reason, f"not within {deadline_s:g} s; last: {last}") from None


def _decoded(data: bytes, answer: type[A]) -> A:
    """The record that the JSON holds. Raises TeacherFailure."""
    try:
        return msgspec.json.decode(data, type=answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TeacherFailure("nonsense", f"its answer cannot be read: {error}; it begins {data[:100]!r}") from error


# --- tokenizers ---


def check_tokenizers(policy: Path, teacher: Path) -> Int32:
    """Raises TeacherFailure, with the first differences, unless each of the policy's tokens is the teacher's by the
    same id, control tokens included: only ids travel between them. The teacher may have more. Returns some ids."""
    ours, theirs = _vocabulary(policy), _vocabulary(teacher)
    if others := sorted(index for index, token in ours.items() if theirs.get(index) != token):
        shown = "; ".join(f"{i} is {ours[i]} for the policy and {theirs.get(i)} for it" for i in others[:3])
        raise TeacherFailure(
            "other_vocabulary",
            f"the teacher's tokenizer in {teacher} is another than the policy's: {len(others)} of {len(ours)} tokens "
            f"differ: {shown}; take a teacher of the policy's own family, with the same tokenizer",
        )
    return np.array(sorted(ours)[:TRIAL_TOKENS], np.int32)


def _vocabulary(folder: Path) -> dict[int, tuple[str, bool]]:
    """(token as the tokenizer writes it, whether it is a control token) by id. Raises ValueError."""
    try:
        tokenizer = load_tokenizer(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"the tokenizer in {folder} cannot be read: {error}") from error
    added = tokenizer.added_tokens_decoder
    control = {int(index) for index, token in added.items() if token.special}
    tokens = {int(index): str(token) for token, index in tokenizer.get_vocab().items()}
    tokens |= {int(index): str(token) for index, token in added.items()}
    return {index: (token, index in control) for index, token in tokens.items()}


def local_folder(name: str) -> Path | None:
    """Where a model's files, or its tokenizer's alone, are on this machine: in the folder `name`, or in the local
    Hugging Face cache. Nothing is fetched: a teacher's weights are large, and its server has them."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if (folder := Path(name)).is_dir():
        return folder
    try:
        found = [try_to_load_from_cache(name, file) for file in ("tokenizer.json", "tokenizer_config.json")]
    except HFValidationError:
        return None
    return next((Path(path).parent for path in found if isinstance(path, str)), None)


async def open_teacher(
    settings: TeacherSettings,
    *,
    model_folder: Path,
    api_key: str | None,
    temperatures: Sequence[float],
    seq_len: int,
    wait_s: float,
) -> ServedTeacher:
    """The teacher at `client.base_url`, once all of its servers are up, which may take `wait_s` seconds, serve it, and
    score at each of `temperatures`, at which the run samples, and its tokenizer has been compared with that of the
    policy in `model_folder`. Raises TeacherFailure, and ValueError for settings."""
    teacher = ServedTeacher(settings, api_key=api_key, seq_len=seq_len)
    try:
        await teacher.inspect(wait_s=wait_s)  # a server on this machine has fetched its files then
        named = settings.model.tokenizer or teacher.model
        if (folder := local_folder(named)) is None:
            raise TeacherFailure(
                "other_vocabulary",
                f"whether the teacher {teacher.model} has the policy's tokenizer cannot be told: {named} is no folder "
                "and not in the local Hugging Face cache; set teacher_model.model.tokenizer to a folder that has it",
            )
        row = await in_thread(check_tokenizers, model_folder, folder)
        await teacher.check_scoring(row, sorted(set(temperatures)))
    except BaseException:
        await teacher.close()
        raise
    return teacher
