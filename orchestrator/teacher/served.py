"""A teacher behind HTTP, on a grpo-infer (POST /policy/score) or any vLLM server (POST /v1/completions with
`prompt_logprobs`).

What may pass, and one that is away may come back, is tried until the deadline: samples that fail cost their rollouts,
and the run must not outpace its teacher.

vLLM's own routes score at temperature 1 only: they take `prompt_logprobs` before any processing, temperature included.
log softmax(z / t) needs the sum of exp(z / t) over the whole vocabulary, which these do not give, and scoring at 1 what
was sampled at t would teach a student that equals its teacher to become another.
"""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import numpy as np
import tenacity

from configs.auxiliary import TeacherSettings
from orchestrator.background import in_thread
from orchestrator.endpoints import ApiClient, EndpointError
from orchestrator.teacher.scoring import checked
from orchestrator.teacher.tokens import SharedTokens, shared_tokens, spread
from transport.records import Float32, Int32

log = logging.getLogger(__name__)

BYTES_PER_TOKEN, BYTES_BESIDE = 1024, 1 << 20
"""What an answer may have."""
TRY_TIMEOUT_S = 60.0
UNTIL_DEADLINE = 10**6
"""Tries, so many that the deadline comes first."""
WAKE_PAUSE_S = 0.5
"""Between two questions to a server that is not up yet."""
TRIAL_TOKENS = 4
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

    def __init__(
        self,
        settings: TeacherSettings,
        *,
        api_key: str | None,
        seq_len: int,
        ours: bool = False,
        tokens: SharedTokens | None = None,
    ) -> None:
        """`seq_len`: of the longest sample. `ours`: whether the servers are grpo-infer. `tokens`: the teacher's ids
        (None: the policy's). Raises ValueError without an address."""
        name, client = settings.model.name, settings.client
        if name is None or not client.base_url:
            raise ValueError(
                f"teacher_model.model.name is {name} and client.base_url of it is {client.base_url}, expected both: "
                "`grpo` starts a teacher and fills in its address, grpo-orch alone must be given one"
            )
        self.model, self.ours, self._deadline_s, self._tokens = name, ours, client.timeout, tokens
        self.servers = [url.rstrip("/").removesuffix("/v1") for url in client.base_url]
        self.longest: int | None = None
        """Tokens of the longest sample that all servers can score; None where they do not tell."""
        self._client = ApiClient(
            lambda: self.servers,
            api_key=api_key,
            retries=UNTIL_DEADLINE,
            timeout_s=TRY_TIMEOUT_S,
            max_bytes=BYTES_BESIDE + BYTES_PER_TOKEN * seq_len,
        )

    @property
    def name(self) -> str:
        """The model's name, and where it is served."""
        return f"the teacher {self.model} at {', '.join(self.servers)}"

    @property
    def num_requests(self) -> int:
        """Requests that were sent, tries after failures included."""
        return self._client.transport.num_requests

    async def close(self) -> None:
        """Closes all connections."""
        await self._client.close()

    async def score(self, token_ids: Int32, temperature: float, *, adapter: int = 0) -> Float32:
        """By the servers in turn."""
        theirs, known = (token_ids, None) if self._tokens is None else self._tokens.translated(token_ids)
        try:
            if self.longest is not None and len(theirs) > self.longest:
                raise EndpointError("too_long", f"{len(theirs)} tokens, and it scores {self.longest}; lower seq_len")
            scores = await self._scores(theirs.tolist(), temperature)
        except EndpointError as error:
            raise EndpointError(error.reason, f"{self.name}: {error}") from None
        return scores if known is None else spread(scores, known)

    async def _scores(self, ids: list[int], temperature: float) -> Float32:
        """[L]. Raises EndpointError."""
        if self.ours:
            scored = await self._posted(
                "/policy/score", {"version": None, "token_ids": ids, "temperature": temperature}, _Score
            )
            if scored.version is not None:
                raise EndpointError("nonsense", f"it scored under version {scored.version}, expected its base model")
            return checked(scored.logprobs, len(ids))
        if abs(temperature - 1.0) > 1e-6:
            raise EndpointError(
                "temperature",
                f"it scores at temperature 1 only, and these tokens were sampled at {temperature:g}; set "
                "sampling.temperature to 1, or serve the teacher with grpo-infer",
            )
        # Of the one token that vLLM's completions must sample nothing is used.
        options = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "return_token_ids": True}
        completed = await self._posted("/v1/completions", {"model": self.model, "prompt": ids, **options}, _Completed)
        if len(completed.choices) != 1 or (entries := completed.choices[0].prompt_logprobs) is None:
            raise EndpointError("nonsense", "it gives no prompt_logprobs; only a server of vLLM's kind can teach")
        if len(entries) != len(ids) or completed.choices[0].prompt_token_ids not in (None, ids):
            raise EndpointError("nonsense", "it read other tokens than it was sent; it changes what it gets")
        known = [(entry or {}).get(token) for token, entry in zip(ids[1:], entries[1:], strict=True)]
        return checked([None if one is None else one.logprob for one in known], len(ids))

    async def _posted(self, path: str, body: dict[str, Any], answer: type[A]) -> A:
        """Raises EndpointError."""
        try:
            async with asyncio.timeout(self._deadline_s):
                return _decoded((await self._client.post(path, body, httpx.Response)).content, answer)
        except TimeoutError:
            failure = self._client.transport.newest_failure
            raise EndpointError(
                "timeout",
                f"no answer within teacher_model.client.timeout = {self._deadline_s:g} s"
                + (f"; the newest failure: {failure}" if failure else ""),
            ) from None

    # --- before the run ---

    async def inspect(self, *, wait_s: float) -> None:
        """Waits for all servers, and learns which kind they are and the longest sample that all can score. Raises
        EndpointError where they do not serve the teacher."""
        found = [await self._inspected(server, wait_s) for server in self.servers]
        if len(kinds := {ours for ours, _ in found}) > 1:
            raise EndpointError("refused", f"of {self.name} some servers are grpo-infer and some are not")
        [self.ours] = kinds
        # For vLLM samples one more.
        self.longest = min((length - 1 for _, length in found if length is not None), default=None)

    async def _inspected(self, server: str, wait_s: float) -> tuple[bool, int | None]:
        """Whether a server is a grpo-infer, and how much it reads, where it tells. Waits until it is up."""
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(lambda e: isinstance(e, EndpointError) and e.reason != "refused"),
            stop=tenacity.stop_after_delay(wait_s),
            wait=tenacity.wait_fixed(WAKE_PAUSE_S),
            reraise=True,
        )
        try:
            info = _decoded(await retrying(self._client.get, f"{server}/policy/info"), _Info)
        except EndpointError as error:
            if error.reason != "refused":  # refused: it has no such route
                told = f"the teacher's server {server} did not come up in {wait_s:g} s: {error}"
                raise EndpointError(error.reason, f"{told}; start it, or mend teacher_model.client.base_url") from None
        else:
            return True, info.max_model_len
        models = {one.id: one for one in _decoded(await self._client.get(f"{server}/v1/models"), _Models).data}
        if self.model not in models:
            raise EndpointError("refused", f"{server} does not serve {self.model!r}; it serves {sorted(models)}")
        return False, models[self.model].max_model_len

    async def use(self, tokens: SharedTokens, temperatures: Sequence[float]) -> None:
        """Asks in the teacher's ids from here on. Has some tokens scored at each temperature. Raises EndpointError."""
        self._tokens = tokens
        trial = np.flatnonzero(tokens.theirs >= 0)[:TRIAL_TOKENS].astype(np.int32)
        for temperature in temperatures:
            await self.score(trial, temperature)
        self._client.transport.num_requests = 0


def _decoded(data: bytes, answer: type[A]) -> A:
    """The record that the JSON holds. Raises EndpointError."""
    try:
        return msgspec.json.decode(data, type=answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EndpointError("nonsense", f"its answer cannot be read: {error}; it begins {data[:100]!r}") from error


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
    policy in `model_folder`. Raises ValueError."""
    teacher = ServedTeacher(settings, api_key=api_key, seq_len=seq_len)
    try:
        await teacher.inspect(wait_s=wait_s)  # a server on this machine has fetched its files then
        named = settings.model.tokenizer or teacher.model
        if (folder := local_folder(named)) is None:
            raise ValueError(
                f"whether the teacher {teacher.model} has the policy's tokens cannot be told: {named} is no folder "
                "and not in the local Hugging Face cache; set teacher_model.model.tokenizer to a folder that has them"
            )
        tokens = await in_thread(shared_tokens, model_folder, folder)
        if tokens.num_unknown:
            log.warning("%s has not %d of the policy's tokens, which it does not teach", named, tokens.num_unknown)
        await teacher.use(tokens, sorted(set(temperatures)))
    except EndpointError as error:
        await teacher.close()
        raise ValueError(str(error)) from None
    except BaseException:
        await teacher.close()
        raise
    return teacher
