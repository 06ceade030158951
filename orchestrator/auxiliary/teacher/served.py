"""A teacher behind HTTP, on a grpo-infer (POST /policy/score) or any vLLM server (POST /v1/completions with
`prompt_logprobs`).

Requests whose failure may pass are tried again until the deadline, also where the teacher is away: a row that is not
scored costs its rollout, and the run must not outpace its teacher.

vLLM's own routes score at temperature 1 only: they take `prompt_logprobs` before any processing, temperature included.
log softmax(z / t) needs the sum of exp(z / t) over the whole vocabulary, which these do not give, and scoring at 1 what
was sampled at t would teach a student that equals its teacher to become another.
"""

import asyncio
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import tenacity
from grpo.configs.auxiliary import TeacherSettings
from grpo.orchestrator.auxiliary.teacher.scoring import checked
from grpo.orchestrator.auxiliary.teacher.tokens import SharedTokens, shared_tokens
from grpo.orchestrator.background import in_thread
from grpo.orchestrator.endpoints import ApiClient, EndpointError
from grpo.transport.http import Scored
from grpo.transport.records import Float32, Int32

log = logging.getLogger(__name__)

TRY_TIMEOUT_S = 60.0
UNTIL_DEADLINE = 10**6
"""Number of tries: so many that the deadline comes first."""
WAKE_PAUSE_S = 0.5
"""Pause between two questions to a server that is not up yet."""
TRIAL_TOKENS = 4
_UNREADABLE = (
    msgspec.MsgspecError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError,
)  # fmt: skip


class ServedTeacher:
    """One server or several that serve the same teacher."""

    def __init__(self, settings: TeacherSettings, *, api_key: str | None, ours: bool = False) -> None:
        """`ours`: whether the servers are grpo-infer. Raises ValueError without an address."""
        name, client = settings.model.name, settings.client
        if name is None or not client.base_url:
            raise ValueError(
                f"teacher_model.model.name is {name} and client.base_url of it is {client.base_url}, expected both: "
                "`grpo` starts a teacher and fills in its address, grpo-orch alone must be given one"
            )
        self.model, self.ours, self._deadline_s = name, ours, client.timeout
        self.servers = [url.rstrip("/").removesuffix("/v1") for url in client.base_url]
        self.name = f"the teacher {name} at {', '.join(self.servers)}"
        self._tokens: SharedTokens | None = None
        self.longest: int | None = None
        """Tokens of the longest sample that all servers can score, once they have been inspected."""
        self._client = ApiClient(lambda: self.servers, api_key=api_key, retries=UNTIL_DEADLINE, timeout_s=TRY_TIMEOUT_S)

    @property
    def num_requests(self) -> int:
        """Returns how many requests were sent, tries after failures included."""
        return self._client.num_requests

    async def close(self) -> None:
        """Closes all connections."""
        await self._client.aclose()

    async def score(self, token_ids: Int32, temperature: float) -> Float32:
        """Asks the servers in turn."""
        theirs = token_ids if self._tokens is None else self._tokens.translated(token_ids)
        try:
            async with asyncio.timeout(self._deadline_s):
                scores = await self._scores(theirs.tolist(), temperature)
        except TimeoutError:
            waited = f"no answer within teacher_model.client.timeout = {self._deadline_s:g} s"
            raise EndpointError("timeout", f"{self.name}: {waited}; {self._client.newest_failure}") from None
        except EndpointError as error:
            raise EndpointError(error.reason, f"{self.name}: {error}") from None
        except _UNREADABLE as error:
            raise EndpointError("nonsense", f"{self.name}: its answer cannot be read: {error!r}") from None
        return scores if self._tokens is None else self._tokens.spread(scores, token_ids)

    async def _scores(self, ids: list[int], temperature: float) -> Float32:
        """Returns [L] scores. Raises EndpointError, and an error of _UNREADABLE for an answer of another form."""
        if self.ours:
            own = {"version": None, "token_ids": ids, "temperature": temperature}
            answer = await self._client.ask("/policy/score", own, httpx.Response)
            scored = msgspec.json.decode(answer.content, type=Scored)
            if scored.version is not None:
                raise EndpointError("nonsense", f"it scored under version {scored.version}, expected its base model")
            return checked(scored.logprobs, len(ids))
        if abs(temperature - 1.0) > 1e-6:
            raise EndpointError(
                "temperature",
                f"it scores at temperature 1 only, and these tokens were sampled at {temperature:g}; set "
                "sampling.temperature to 1, or serve the teacher with grpo-infer",
            )
        # vLLM's completions must sample a token; it is not used.
        options = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "return_token_ids": True}
        body = {"model": self.model, "prompt": ids, **options}
        [choice] = (await self._client.ask("/v1/completions", body, httpx.Response)).json()["choices"]
        if (entries := choice.get("prompt_logprobs")) is None:
            raise EndpointError("nonsense", "it gives no prompt_logprobs; only a server of vLLM's kind can teach")
        if len(entries) != len(ids) or choice.get("prompt_token_ids") not in (None, ids):
            raise EndpointError("nonsense", "it read other tokens than it was sent; it changes what it gets")
        return checked(
            [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], entries[1:], strict=True)], len(ids)
        )

    # --- before the run ---

    async def inspect(self, *, wait_s: float) -> None:
        """Waits for all servers, and finds out their kind and the longest sample that all can score. Raises
        EndpointError where they do not serve the teacher."""
        found = [await self._inspected(server, wait_s) for server in self.servers]
        if len(kinds := {ours for ours, _ in found}) > 1:
            raise EndpointError("refused", f"of {self.name} some servers are grpo-infer and some are not")
        [self.ours] = kinds
        self.longest = min(length for _, length in found) - 1  # for vLLM samples one more

    async def _inspected(self, server: str, wait_s: float) -> tuple[bool, int]:
        """Returns whether a server is a grpo-infer, and how many tokens it reads. Waits until it is up."""
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(lambda e: isinstance(e, EndpointError) and e.reason != "refused"),
            stop=tenacity.stop_after_delay(wait_s),
            wait=tenacity.wait_fixed(WAKE_PAUSE_S),
            reraise=True,
        )
        try:
            info = json.loads(await retrying(self._client.fetch, f"{server}/policy/info", retries=0))
            return True, int(info["max_model_len"])
        except EndpointError as error:
            if error.reason != "refused":  # refused: it has no such route
                away = f"the teacher's server {server} did not come up in {wait_s:g} s: {error}"
                raise EndpointError(error.reason, f"{away}; start it, or mend teacher_model.client.base_url") from None
        listed = json.loads(await self._client.fetch(f"{server}/v1/models", retries=0))["data"]
        models: dict[str, Any] = {one["id"]: one for one in listed}
        if self.model not in models:
            raise EndpointError("refused", f"{server} does not serve {self.model!r}; it serves {sorted(models)}")
        return False, int(models[self.model]["max_model_len"])

    async def use(self, tokens: SharedTokens, temperatures: Sequence[float]) -> None:
        """Translates into the teacher's ids from here on, and has some tokens scored at each temperature. Raises
        EndpointError."""
        self._tokens = tokens
        trial = np.flatnonzero(tokens.theirs >= 0)[:TRIAL_TOKENS].astype(np.int32)
        for temperature in temperatures:
            await self.score(trial, temperature)


async def open_teacher(
    settings: TeacherSettings,
    *,
    model_folder: Path,
    api_key: str | None,
    temperatures: Sequence[float],
    wait_s: float,
) -> ServedTeacher:
    """Returns the teacher at `client.base_url` once all of its servers are up and have scored at each of
    `temperatures`, at which the run samples, and its tokenizer has been compared with that of the policy in
    `model_folder`. Waits `wait_s` seconds for each server. Raises ValueError."""
    teacher = ServedTeacher(settings, api_key=api_key)
    try:
        await teacher.inspect(wait_s=wait_s)  # a server on this machine has fetched its files then
        named = settings.model.tokenizer or teacher.model
        tokens = await in_thread(shared_tokens, model_folder, named)
        if num_unknown := int((tokens.theirs < 0).sum()):
            log.warning("%s lacks %d of the policy's tokens, which have no term of the teacher", named, num_unknown)
        await teacher.use(tokens, sorted(set(temperatures)))
    except BaseException as error:
        await teacher.close()
        if isinstance(error, EndpointError | KeyError | TypeError):
            raise ValueError(f"{teacher.name} cannot teach: {error}") from None
        raise
    return teacher
