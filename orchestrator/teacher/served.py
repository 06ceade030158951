"""A teacher behind HTTP, on a grpo-infer (POST /policy/score) or any vLLM server (POST /v1/completions with
`prompt_logprobs`): a bounded number of requests at a time, retries with growing pauses, a deadline for each sample.

One that cannot be reached, itself or behind its proxy, is tried until the deadline, however often that is: it may be
starting again, samples that fail cost their rollouts, and the run must not outpace its teacher.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import tenacity

from configs.auxiliary import TeacherSettings
from orchestrator.background import in_thread
from orchestrator.endpoints import CONNECT_TIMEOUT_S, MAX_ECHO, BoundedTransport, Unacceptable
from orchestrator.renderer import load_tokenizer
from orchestrator.teacher.prefill import Completions, PolicyInfo, PolicyScore, ServedModels, decoded
from orchestrator.teacher.scoring import FailureReason, Teacher, TeacherFailure
from transport.records import Float32, Int32
from transport.weights.identity import base_identity

BYTES_PER_TOKEN, BYTES_BESIDE = 1024, 1 << 20
"""What an answer may have."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 10.0
UP_PAUSE_S = 0.2
"""Between looking whether a server is up."""
TRIAL_TOKENS = 4
_INFO = "/policy/info"
MAX_NAMED = 3
"""Differences between tokenizers that an error spells out."""
_FINAL = frozenset[FailureReason]({"refused", "temperature", "too_long", "other_vocabulary"})
"""Reasons that do not pass."""


class ServedTeacher(Teacher):
    """One server or several that serve the same teacher."""

    def __init__(
        self,
        settings: TeacherSettings,
        *,
        api_key: str | None,
        seq_len: int,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        """`seq_len`: of the longest sample. Raises ValueError without an address."""
        name, client = settings.model.name, settings.client
        if name is None or not client.base_url:
            raise ValueError(
                f"teacher_model.model.name is {name} and client.base_url of it is {client.base_url}, expected both: "
                "`grpo` starts a teacher and fills in its address, grpo-orch alone must be given one"
            )
        self.model, self._client, self._first_pause_s = name, client, first_pause_s
        self.servers = [url.rstrip("/").removesuffix("/v1") for url in client.base_url]
        self.kind: PolicyScore | Completions = Completions(name)
        self.longest: int | None = None
        """Tokens of the longest sample that all servers can score; None where they do not tell."""
        self._num_in_flight: Counter[str] = Counter()
        self._turns = asyncio.Semaphore(client.max_concurrent_requests)
        self._key = api_key
        self._http = httpx.AsyncClient(
            transport=BoundedTransport(
                api_key=api_key,
                timeout_s=client.try_timeout_s,
                max_bytes=BYTES_BESIDE + BYTES_PER_TOKEN * seq_len,
            ),
            timeout=httpx.Timeout(None, connect=min(CONNECT_TIMEOUT_S, client.try_timeout_s)),
            trust_env=False,
        )

    @property
    def name(self) -> str:
        """The model's name, and where it is served."""
        return f"the teacher {self.model} at {', '.join(self.servers)}"

    async def close(self) -> None:
        """Closes all connections."""
        await self._http.aclose()

    async def score(self, token_ids: Int32, temperature: float, *, adapter: int = 0) -> Float32:
        """By whichever server has failed it least and is least loaded, after as many tries as are allowed."""
        return await self._scored(self.servers, token_ids, temperature)

    async def _scored(self, servers: Sequence[str], token_ids: Int32, temperature: float) -> Float32:
        if self.longest is not None and len(token_ids) > self.longest:
            message = f"the teacher {self.model}: {len(token_ids)} tokens, and it scores {self.longest}; lower seq_len"
            raise TeacherFailure("too_long", message)
        body, failed = self.kind.request(token_ids, temperature), Counter[str]()
        last = TeacherFailure("slow", "nothing came")

        async def attempt() -> Float32:
            nonlocal last
            server = min(servers, key=lambda one: (failed[one], self._num_in_flight[one]))
            self._num_in_flight[server] += 1
            try:
                return self._read(server, await self._asked("POST", server, self.kind.path, body), token_ids)
            except TeacherFailure as error:
                failed[server] += 1
                failed[""] += error.reason != "down"
                last = error
                raise
            finally:
                self._num_in_flight[server] -= 1

        def wait_s(state: tenacity.RetryCallState) -> float:
            self.num_retries += 1
            growing = tenacity.wait_random_exponential(multiplier=self._first_pause_s, max=MAX_PAUSE_S)(state)
            return max(growing, self._first_pause_s / 2, min(last.pause_s, MAX_PAUSE_S))

        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(lambda e: isinstance(e, TeacherFailure) and e.reason not in _FINAL),
            stop=lambda state: failed[""] > self._client.retries,
            wait=wait_s,
            reraise=True,
        )
        async with self._turns:
            try:
                async with asyncio.timeout(self._client.timeout):
                    return await retrying(attempt)
            except TimeoutError:
                message = f"no answer within {self._client.timeout:g} s, the last time: {last}"
                raise TeacherFailure(last.reason, f"the teacher {self.model}: {message}") from None

    def _read(self, server: str, data: bytes, token_ids: Int32) -> Float32:
        """Raises TeacherFailure."""
        try:
            return self.kind.read(data, token_ids)
        except TeacherFailure as error:
            raise TeacherFailure(error.reason, f"the teacher {self.model} at {server}: {error}") from None

    async def _asked(self, method: str, server: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """The body of an answer of 200. Raises TeacherFailure."""
        response = await self._response(method, server, path, body)
        if response.status_code == 200:
            return response.content
        told = response.text.replace(self._key or "\0", "***")[:MAX_ECHO]  # a cut key is half a key
        raise TeacherFailure(
            _reason(response.status_code),
            f"the teacher {self.model} at {server}: {path} answered {response.status_code}: {told}",
            pause_s=_seconds(response.headers.get("retry-after")),
        )

    async def _response(self, method: str, server: str, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        """Raises TeacherFailure."""
        self.num_requests += 1
        content, headers = None if body is None else msgspec.json.encode(body), {"content-type": "application/json"}
        reason: FailureReason
        try:
            return await self._http.request(method, server + path, content=content, headers=headers)
        except (Unacceptable, httpx.InvalidURL) as error:
            reason, told = "nonsense", str(error)
        except httpx.HTTPError as error:
            reason, told = _reason_of(error), f"{type(error).__name__}: {error}"
        raise TeacherFailure(reason, f"the teacher {self.model} at {server}: {told}")

    # --- before the run ---

    async def inspect(self, *, wait_s: float) -> None:
        """Waits for all servers, and learns which kind they are and the longest sample that all can score. Raises
        TeacherFailure where they serve something else than the teacher, as far as its files are on this machine."""
        infos = await asyncio.gather(*(self._info(server, wait_s) for server in self.servers))
        ours = [info for info in infos if info is not None]
        if ours and len(ours) < len(infos):
            raise TeacherFailure(
                "refused", f"of the teacher's servers {', '.join(self.servers)} some are grpo-infer and some are not"
            )
        if ours:
            self.kind = PolicyScore()
            lengths: list[int | None] = [info.max_model_len for info in ours]
            self._check_identities(infos, await in_thread(_identity, self.model))
        else:
            lengths = [await self._length(server) for server in self.servers]
        # For vLLM samples one more.
        self.longest = min((length - 1 for length in lengths if length is not None), default=None)

    async def check_scoring(self, token_ids: Int32, temperatures: Sequence[float]) -> None:
        """Has every server score a row at each temperature. Raises TeacherFailure."""
        for server in self.servers:
            for temperature in temperatures:
                await self._scored([server], token_ids, temperature)
        self.num_requests = self.num_retries = 0

    def _check_identities(self, infos: Sequence[PolicyInfo | None], expected: str | None) -> None:
        for server, info in zip(self.servers, infos, strict=True):
            if info is not None and None not in (expected, info.base_model) and info.base_model != expected:
                raise TeacherFailure(
                    "refused",
                    f"the teacher's server {server} serves a model with identity {info.base_model}, expected "
                    f"{expected} of teacher_model.model.name = {self.model}; start it with that model, or name "
                    "the one that it serves",
                )

    async def _info(self, server: str, wait_s: float) -> PolicyInfo | None:
        """What a grpo-infer says about itself; None for a server of another kind. Waits until it is up."""
        last: Exception | None = None
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    try:
                        if (await self._response("GET", server, _INFO, None)).status_code in (404, 405):
                            return None
                        return decoded(await self._asked("GET", server, _INFO), PolicyInfo)
                    except TeacherFailure as error:
                        if error.reason not in ("down", "slow", "busy", "cut_off"):
                            raise
                        last = error
                    await asyncio.sleep(UP_PAUSE_S)
        except TimeoutError:
            raise TeacherFailure(
                "down",
                f"waited {wait_s:g} s for the teacher's server {server} to come up: {last}; start it, or mend "
                "teacher_model.client.base_url",
            ) from None

    async def _length(self, server: str) -> int | None:
        """What a server reads, where it tells. Raises TeacherFailure where it does not serve the teacher."""
        models = {one.id: one for one in decoded(await self._asked("GET", server, "/v1/models"), ServedModels).data}
        if self.model not in models:
            raise TeacherFailure("refused", f"{server} does not serve {self.model!r}; it serves {sorted(models)}")
        return models[self.model].max_model_len


def _reason(status: int) -> FailureReason:
    if status in (408, 425, 429):
        return "busy"
    if status in (502, 503, 504):
        return "down"
    return "error" if status >= 500 else "refused"


def _reason_of(error: httpx.HTTPError) -> FailureReason:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return "down"
    return "slow" if isinstance(error, httpx.TimeoutException) else "cut_off"


def _seconds(header: str | None) -> float:
    try:
        return max(0.0, float(header or 0))
    except ValueError:
        return 0.0


# --- tokenizers ---


def check_tokenizers(policy: Path, teacher: Path) -> Int32:
    """Raises TeacherFailure, with the first differences, unless each of the policy's tokens is the teacher's by the
    same id, control tokens included: only ids travel between them. The teacher may have more. Returns some ids."""
    ours, theirs = _vocabulary(policy), _vocabulary(teacher)
    if others := sorted(index for index, token in ours.items() if theirs.get(index) != token):
        shown = "; ".join(f"{i} is {ours[i]} for the policy and {theirs.get(i)} for it" for i in others[:MAX_NAMED])
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
    if (folder := Path(name)).is_dir():
        return folder
    if folder.is_absolute() or name.startswith(".") or name.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = [try_to_load_from_cache(name, file) for file in ("tokenizer.json", "tokenizer_config.json")]
    except HFValidationError:
        return None
    return next((Path(path).parent for path in found if isinstance(path, str)), None)


def _identity(name: str) -> str | None:
    """Of the model's files; None where they are not on this machine."""
    folder = local_folder(name)
    return base_identity(folder) if folder is not None and any(folder.glob("*.safetensors")) else None


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
