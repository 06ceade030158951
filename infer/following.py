"""Requests that follow the newest version: they are continued under each version as it becomes live.

vLLM binds a request to one adapter. So a request that follows is ended where it stands when a newer version has been
proved, and prompt and answer so far are given to the newer one as a prompt, for the rest of its tokens. What has been
computed under the earlier version, attention keys and values included, is not used again.

Knows nothing of HTTP or vLLM.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

from infer.vllm_api import Adapter, SamplingRequest
from transport.http import Choice

Runs = list[tuple[int, int]]
"""Runs of (version, number of tokens), in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What serves a request that follows, until it is `superseded`."""

    version: int
    adapter: Adapter | None
    """None where the version's weights are the model's own."""
    superseded: asyncio.Event
    """Set once the request must move on: a newer version is live, or this one is about to be replaced."""


class Versions(Protocol):
    """What of the table of versions is needed here."""

    def following(self, version: int, *, noisy: bool, adapter: str | None) -> AbstractAsyncContextManager[Serving]:
        """The newest live version, which is at least `version`; the request is counted in flight. Raises NotLive, and
        UnknownAdapter."""


class Sampler(Protocol):
    """What of the engine is needed here."""

    async def generate_until(
        self, requests: Sequence[SamplingRequest], adapter: Adapter | None, superseded: asyncio.Event
    ) -> list[Choice]:
        """One answer to each; those that are not through when `superseded` is set end there, as `superseded`."""


@dataclass(slots=True, kw_only=True)
class _Answer:
    """One answer in the making."""

    request: SamplingRequest
    """With n = 1."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: Runs = field(default_factory=list)
    ended: Choice | None = None
    """The last part, once there is no more to come."""

    def rest(self, version: int) -> SamplingRequest:
        """What is left to sample, under this version. A seed serves once: continued with the same one, an answer would
        get the random numbers again that have made its beginning."""
        done, asked = len(self.token_ids), self.request
        if not done:
            return asked
        return replace(
            asked,
            prompt_token_ids=[*asked.prompt_token_ids, *self.token_ids],
            max_tokens=asked.max_tokens - done,
            min_tokens=max(0, asked.min_tokens - done),
            seed=None if asked.seed is None else continued_seed(asked.seed, version),
        )

    def take(self, part: Choice, version: int) -> None:
        """Append what this version has sampled, if anything."""
        self.token_ids += part.token_ids
        self.logprobs += part.logprobs
        if part.token_ids:
            self.versions = extended(self.versions, version, len(part.token_ids))
        if part.finish_reason != "superseded":
            self.ended = part

    def followed(self) -> Choice:
        """The whole answer."""
        assert self.ended is not None
        return Choice(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=self.ended.finish_reason,
            stop_reason=self.ended.stop_reason,
            versions=tuple(self.versions),
        )


async def follow(
    engine: Sampler,
    table: Versions,
    wanted: SamplingRequest,
    *,
    version: int,
    noisy: bool,
    adapter: str | None = None,
) -> list[Choice]:
    """`wanted.n` answers of an adapter (None: the first), begun under the newest live version, which must be at least
    `version`, and continued under each newer one. The first parts are what a request that does not follow would get
    with the same seed.

    Raises what the table and the engine raise; no version is ever gone back to.
    """
    answers = [
        _Answer(request=replace(wanted, n=1, seed=None if wanted.seed is None else wanted.seed + index))
        for index in range(wanted.n)
    ]
    while pending := [answer for answer in answers if answer.ended is None]:
        async with table.following(version, noisy=noisy, adapter=adapter) as serving:
            version = serving.version
            requests = [answer.rest(version) for answer in pending]
            parts = await engine.generate_until(requests, serving.adapter, serving.superseded)
        for answer, part in zip(pending, parts, strict=True):
            answer.take(part, version)
    return [answer.followed() for answer in answers]


def continued_seed(seed: int, version: int) -> int:
    """The seed of an answer's part under a version, 0 to 2^56 - 1."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{version}".encode()).digest()[:7])


def extended(runs: Runs, version: int, num: int) -> Runs:
    """The runs with `num` more tokens of `version`."""
    if runs and runs[-1][0] == version:
        return [*runs[:-1], (version, runs[-1][1] + num)]
    return [*runs, (version, num)]
