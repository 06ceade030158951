"""Requests that follow the newest version: they are continued under each version as it becomes live.

vLLM binds a request to one adapter. So a request that follows is ended where it stands when a newer version has been
proved, and prompt and answer so far are given to the newer one as a prompt, for the rest of its tokens. What has been
computed under the earlier version, attention keys and values included, is not used again.
"""

import hashlib
from dataclasses import dataclass, field

from msgspec.structs import replace

from infer.engine import Engine
from infer.versions import VersionTable
from transport.http import Choice, GenerateRequest


@dataclass(slots=True, kw_only=True)
class _Answer:
    """One answer in the making."""

    request: GenerateRequest
    """With n = 1."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Runs of (version, number of tokens), in order."""
    ended: Choice | None = None
    """The last part, once the answer is whole."""

    def rest(self, version: int) -> GenerateRequest:
        """Returns what asks a version for the tokens that are still missing. A seed serves once: continued with the
        same one, an answer would get the random numbers again that have made its beginning."""
        wanted, num = self.request, len(self.token_ids)
        if num == 0:
            return wanted
        return replace(
            wanted,
            prompt_token_ids=[*wanted.prompt_token_ids, *self.token_ids],
            max_tokens=wanted.max_tokens - num,
            min_tokens=max(0, wanted.min_tokens - num),
            seed=None if wanted.seed is None else continued_seed(wanted.seed, version),
        )

    def take(self, part: Choice, version: int) -> None:
        """Adds what a version has sampled."""
        self.token_ids += part.token_ids
        self.logprobs += part.logprobs
        if part.token_ids:
            before = self.versions.pop()[1] if self.versions and self.versions[-1][0] == version else 0
            self.versions.append((version, before + len(part.token_ids)))
        if part.finish_reason != "superseded":
            self.ended = part
        elif len(self.token_ids) >= self.request.max_tokens:
            self.ended = replace(part, finish_reason="length")


async def follow(engine: Engine, table: VersionTable, wanted: GenerateRequest) -> list[Choice]:
    """Returns `wanted.n` answers, begun under the newest live version, which must be at least `wanted.version`, and
    continued under each newer one. The first parts are what a request that does not follow would get with the same
    seed. No version is ever gone back to.

    Raises what the table and the engine raise.
    """
    seeds = [None if wanted.seed is None else wanted.seed + index for index in range(wanted.n)]
    answers = [_Answer(request=replace(wanted, n=1, seed=seed)) for seed in seeds]
    version = wanted.version
    while pending := [answer for answer in answers if answer.ended is None]:
        async with table.using(version, noisy=wanted.noisy, adapter=wanted.adapter, follow=True) as (served, adapter):
            version = served.version
            assert version is not None
            requests = [answer.rest(version) for answer in pending]
            parts = await engine.generate_until(requests, adapter, served.superseded)
        for answer, part in zip(pending, parts, strict=True):
            answer.take(part, version)
    whole = [(answer, answer.ended) for answer in answers if answer.ended is not None]
    return [replace(last, token_ids=a.token_ids, logprobs=a.logprobs, versions=tuple(a.versions)) for a, last in whole]


def continued_seed(seed: int, version: int) -> int:
    """Returns the seed of an answer's part under a version, 0 to 2^56 - 1."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{version}".encode()).digest()[:7])
