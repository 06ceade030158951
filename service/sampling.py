"""Samples from tenants' snapshots on a grpo-infer.

A snapshot is a policy version like any other: written with its canary, and live on the server only once that scores it
as the trainer does. A version that the server does not have any more is loaded and proved again when it is asked for.
"""

import asyncio
import itertools
import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import httpx
import numpy as np
from grpo.service.errors import Refused
from grpo.service.log import Answer, Command, CommandLog
from grpo.service.training import ALPHA
from grpo.trainer.model import Policy
from grpo.trainer.publishing import CanaryMaker, canary_ids
from grpo.trainer.weights import AdapterWeights
from grpo.transport.http import (
    NO_SLOTS,
    Generated,
    GenerateRequest,
    LoadRequest,
    Scored,
    ScoreRequest,
    ServerInfo,
    UnloadRequest,
)
from grpo.transport.records import PolicySpec
from grpo.transport.run import RunFolder
from grpo.transport.weights.store import CANARY_FILE, PolicyPublisher
from tinker.proto import tinker_public_pb2 as schema

log = logging.getLogger(__name__)

MAX_RUNNING = 64
"""Requests that the server has at once; more wait here."""
MAX_SAMPLES = 1024
TIMEOUT_S = 600.0
CANARY_SEED = 0
_PARAMS = frozenset({"max_tokens", "seed", "stop", "temperature", "top_k", "top_p"})
_NEUTRAL = {
    "topk_prompt_logprobs": 0,
    "topk_sample_logprobs": 0,
    "target_prompt_logprobs": None,
    "prompt_alt_tokens_k": 0,
    "record_stability_info": False,
}
"""Fields of a request that are not served, and the value that asks for nothing."""


class Sampling:
    """The end of the service that talks to the server. Its methods belong to the event loop, but for `publish`."""

    def __init__(
        self,
        commands: CommandLog,
        run: RunFolder,
        *,
        url: str,
        key: str | None,
        base_model: str,
        max_tokens: int,
        encode: Callable[[str], list[int]],
        finished: Callable[[str], None],
    ) -> None:
        """`base_model` is the base's identity, `max_tokens` the longest sequence with its answer, `encode` the
        tokenizer without special tokens, and `finished` is called with the id of each request that has ended."""
        self._log, self._run, self._base_model, self._max_tokens = commands, run, base_model, max_tokens
        self._encode, self._finished = encode, finished
        self._publisher = PolicyPublisher(run.broadcasts, run_id=run.run_id)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_S)
        self._loop = asyncio.get_running_loop()
        self._places = asyncio.Semaphore(MAX_RUNNING)
        self._loading: dict[int, asyncio.Task[None]] = {}
        self._uses = itertools.count(1)
        self._used: dict[int, int] = {}
        """By version, the number of its newest use."""
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begins what was waiting when the service ended."""
        for command in self._log.waiting(("asample",)):
            self.submit(command)

    async def close(self) -> None:
        """Ends what runs; it is done after the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()

    # --- snapshots ---

    def publish(self, policy: Policy, command: Command, path: str) -> Future[int]:
        """Writes the policy as the next version, in the thread that trains, and begins to load it."""
        assert isinstance(policy.weights, AdapterWeights)
        version = self._log.new_version(command.target, path)
        snapshot = policy.weights.snapshot()
        ids = canary_ids(policy.causal_lm.config, seed=CANARY_SEED)
        canary = CanaryMaker(policy, ids).begin(version=version, noise={})(snapshot)
        files = policy.weights.files(snapshot)
        spec = PolicySpec(
            base_model=self._base_model,
            rank=int(json.loads(files["adapter_config.json"])["r"]),
            alpha=ALPHA,
            target_modules=policy.weights.target_modules,
            sequence_len=self._max_tokens,
            dtype=policy.dtype_name,
        )
        self._publisher.publish(version=version, spec=spec, files={**files, CANARY_FILE: canary.to_json()})

        async def load() -> int:
            await self._load(version)
            return version

        return asyncio.run_coroutine_threadsafe(load(), self._loop)

    async def _load(self, version: int) -> None:
        """Returns once the version is live. Requests at the same time share one load."""
        if (loading := self._loading.get(version)) is None:
            loading = self._loading[version] = asyncio.create_task(self._load_now(version))
            loading.add_done_callback(lambda _: self._loading.pop(version))
        await asyncio.shield(loading)

    async def _load_now(self, version: int) -> None:
        """Has the server load a version; where it has no slot, in place of the one that was used longest ago."""
        request = LoadRequest(run_id=self._run.run_id, version=version)
        while (answer := await self._http.post("/policy/load", content=request.to_json())).status_code != 200:
            if answer.status_code != 409 or answer.json()["error"]["type"] != NO_SLOTS:
                raise RuntimeError(f"the server refuses version {version}: {answer.text[:500]}")
            info = ServerInfo.from_json((await self._http.get("/policy/info")).content)
            if not info.live:
                raise RuntimeError(f"the server has no slot for version {version}: {answer.text[:500]}")
            oldest = min(info.live, key=lambda one: self._used.get(one, 0))
            await self._http.post("/policy/unload", content=UnloadRequest(version=oldest).to_json())
        self._used[version] = next(self._uses)

    def open(self, sampler: str, tenant: str, path: str | None) -> None:
        """Adds a sampling session of a snapshot, or of the base model for None. Raises `Refused`."""
        version = None
        if path is not None:
            if not self._log.has_checkpoint(path, tenant):
                raise Refused(f"model_path is {path!r:.160}, and there is no such checkpoint", status=404)
            if (version := self._log.version_of(path)) is None:
                raise Refused(f"{path} is no sampler's checkpoint; use what save_weights_for_sampler has returned")
        self._log.add_sampler(sampler, tenant, path, version)

    # --- samples ---

    def submit(self, command: Command) -> None:
        """Begins a request that is in the log."""
        task = asyncio.create_task(self._answer(command))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, command: Command) -> None:
        try:
            async with self._places:
                answer = Answer(state="proto", content=await self._sample(command))
        except Refused as error:
            answer = Answer(state="failed", content=str(error).encode())
        except Exception as error:
            log.exception("%s", command.request_id)
            answer = Answer(state="broken", content=f"{type(error).__name__}: {error}".encode())
        await asyncio.wrap_future(self._log.finish(command, answer))
        self._finished(command.request_id)

    async def _sample(self, command: Command) -> bytes:
        asked = json.loads(command.body)
        _, version = self._log.sampler(command.target, command.tenant)
        prompt, scored = prompt_of(asked), bool(asked.get("prompt_logprobs"))
        requests, copies = self._requests(asked, prompt, version)
        message = schema.SampleResponse()
        if scored:
            last_n = asked.get("prompt_logprobs_last_n") or len(prompt)
            message.prompt_logprobs = (await self._scores(prompt, version, last_n=last_n)).tobytes()
        generated = await self._post("/policy/generate", requests, Generated, version)
        for choice in generated.choices * copies:
            sequence = message.sequences.add()
            sequence.stop_reason = (
                schema.STOP_REASON_LENGTH if choice.finish_reason == "length" else schema.STOP_REASON_STOP
            )
            sequence.tokens = np.array(choice.token_ids, "<i4").tobytes()
            sequence.logprobs = np.array(choice.logprobs, "<f4").tobytes()
        content: bytes = message.SerializeToString(deterministic=True)
        return content

    def _requests(
        self, asked: Mapping[str, Any], prompt: list[int], version: int | None
    ) -> tuple[GenerateRequest, int]:
        """Returns the server's request, and how many times each answer counts: greedy ones are all equal."""
        params, number = asked.get("sampling_params") or {}, asked.get("num_samples", 1)
        if not isinstance(number, int) or not 1 <= number <= MAX_SAMPLES:
            raise Refused(f"num_samples is {number!r:.40}, expected 1 to {MAX_SAMPLES}")
        for name, neutral in _NEUTRAL.items():
            if asked.get(name) not in (None, neutral):
                raise Refused(f"{name} is not served")
        if unknown := sorted(params.keys() - _PARAMS):
            raise Refused(f"sampling_params has {unknown[0]}, expected {', '.join(sorted(_PARAMS))}")
        if params.get("top_k", -1) not in (-1, 0) or params.get("top_p", 1) != 1:
            raise Refused("top_k and top_p are not served: tokens come from the model's own distribution")
        room = self._max_tokens - len(prompt)
        max_tokens = min(params.get("max_tokens") or room, room)
        if max_tokens < 1:
            raise Refused(f"the prompt has {len(prompt)} tokens, and a sequence at most {self._max_tokens}")
        temperature, seed = params.get("temperature", 1.0), params.get("seed")
        greedy = temperature == 0
        fields: dict[str, Any] = {
            "version": version,
            "prompt_token_ids": prompt,
            "max_tokens": max_tokens,
            "n": 1 if greedy else number,
            "temperature": temperature,
            "seed": None if seed is None else seed % (2**63 - 1),
            "stop_token_ids": self._stop_ids(params.get("stop")),
        }
        try:
            return GenerateRequest(**fields), number if greedy else 1
        except (ValueError, TypeError) as error:
            raise Refused(f"sampling_params: {error}") from error

    def _stop_ids(self, stop: Any) -> list[int]:
        if stop is None:
            return []
        if stop == []:
            raise Refused("stop is []: an answer always ends at the model's end token here")
        found: list[int] = []
        for one in [stop] if isinstance(stop, str) else stop:
            ids = self._encode(one) if isinstance(one, str) else [one]
            if len(ids) != 1:
                raise Refused(f"stop has {one!r:.60}, which is {len(ids)} tokens; only single tokens are served")
            found += ids
        return found

    async def _scores(self, prompt: list[int], version: int | None, *, last_n: int) -> Any:
        """Returns [L] float32 log-probabilities of the prompt's tokens at temperature 1; NaN for the first, and for all
        but the last `last_n`."""
        scores = np.full(len(prompt), np.nan, "<f4")
        if len(prompt) > 1:
            request = ScoreRequest(version=version, token_ids=prompt)
            scores[1:] = (await self._post("/policy/score", request, Scored, version)).logprobs
            scores[: len(prompt) - last_n] = np.nan
        return scores

    async def _post(self, route: str, request: Any, answer_type: Any, version: int | None) -> Any:
        """Returns the server's answer; a version that it does not have is loaded first. Raises `Refused` for what the
        server does not take."""
        if version is not None:
            self._used[version] = next(self._uses)
        for attempt in range(3):
            answer = await self._http.post(route, content=request.to_json())
            if answer.status_code == 200:
                return answer_type.from_json(answer.content)
            if answer.status_code == 404 and version is not None and attempt < 2:
                await self._load(version)
                continue
            if answer.status_code == 400:
                raise Refused(answer.json()["error"]["message"])
            break
        raise RuntimeError(f"the server answers {route} with {answer.status_code}: {answer.text[:500]}")


def prompt_of(asked: Mapping[str, Any]) -> list[int]:
    """Returns a request's prompt. Raises `Refused`."""
    prompt: list[int] = []
    for chunk in (asked.get("prompt") or {}).get("chunks", []):
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise Refused(f"the prompt has a chunk of type {chunk['type']!r:.40}; only tokens are served")
        prompt += chunk["tokens"]
    if not prompt or not all(isinstance(token, int) for token in prompt):
        raise Refused("the prompt has no tokens, or other things than token ids")
    return prompt
