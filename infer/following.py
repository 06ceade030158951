"""Requests that follow the newest version: they are continued under each version as it becomes live.

vLLM binds a request to one adapter. So a request that follows is ended where it stands when a newer version is live,
which gets prompt and answer so far as a prompt. Nothing computed under the earlier version is used again.
"""

import hashlib

import numpy as np
from grpo.infer.engine import Engine
from grpo.infer.versions import VersionTable
from grpo.transport.http import Choice, GenerateRequest
from msgspec.structs import replace

_NOTHING = Choice(token_ids=np.empty(0, np.int32), logprobs=np.empty(0, np.float32), finish_reason="superseded")


async def follow(engine: Engine, table: VersionTable, wanted: GenerateRequest) -> list[Choice]:
    """Returns `wanted.n` answers, begun under the newest live version, which must be at least `wanted.version`, and
    continued under each newer one. Raises what the table and the engine raise."""
    answers, version = [_NOTHING] * wanted.n, wanted.version
    while pending := [place for place, answer in enumerate(answers) if answer.finish_reason == "superseded"]:
        async with table.using(version, noisy=wanted.noisy, adapter=wanted.adapter, follow=True) as (served, adapter):
            version = served.version
            assert version is not None
            requests = [_rest(wanted, place, answers[place], version) for place in pending]
            parts = await engine.generate_until(requests, adapter, served.superseded)
        for place, part in zip(pending, parts, strict=True):
            answers[place] = _joined(answers[place], part, version, wanted.max_tokens)
    return answers


def _rest(wanted: GenerateRequest, place: int, begun: Choice, version: int) -> GenerateRequest:
    """Returns the request for the tokens that an answer lacks. A seed serves once: continued with the same one, an
    answer would get the random numbers of its beginning again."""
    num, seed = len(begun.token_ids), None if wanted.seed is None else wanted.seed + place
    return replace(
        wanted,
        n=1,
        prompt_token_ids=[*wanted.prompt_token_ids, *begun.token_ids.tolist()],
        max_tokens=wanted.max_tokens - num,
        min_tokens=max(0, wanted.min_tokens - num),
        seed=seed if seed is None or num == 0 else continued_seed(seed, version),
    )


def _joined(begun: Choice, part: Choice, version: int, max_tokens: int) -> Choice:
    """Returns an answer, extended by what a version has sampled."""
    token_ids, versions = np.concatenate([begun.token_ids, part.token_ids]), list(begun.versions or ())
    if len(part.token_ids):
        before = versions.pop()[1] if versions and versions[-1][0] == version else 0
        versions.append((version, before + len(part.token_ids)))
    is_full = part.finish_reason == "superseded" and len(token_ids) >= max_tokens
    return replace(
        part,
        token_ids=token_ids,
        logprobs=np.concatenate([begun.logprobs, part.logprobs]),
        versions=tuple(versions),
        finish_reason="length" if is_full else part.finish_reason,
    )


def continued_seed(seed: int, version: int) -> int:
    """Returns the seed of an answer's part under a version, 0 to 2^56 - 1."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{version}".encode()).digest()[:7])
