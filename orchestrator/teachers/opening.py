"""A teacher's servers, from their addresses to a client that has seen them score; or the reason why it cannot be."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import numpy as np

from configs.channels import TeacherSettings
from orchestrator.teachers.answers import BYTES_BESIDE, TryAgain, body_of, of_status, text_of
from orchestrator.teachers.client import CONNECT_TIMEOUT_S, HttpTeacher
from orchestrator.teachers.endpoints import CompletionsEndpoint, Endpoint, PolicyEndpoint, PolicyInfo, decoded
from orchestrator.teachers.rows import TeacherCounts
from orchestrator.teachers.scoring import TeacherRefused
from orchestrator.teachers.vocabulary import TextCodec, Vocabulary, check_same, probes
from transport.weights.identity import base_identity

PAUSE_S = 0.2
"""Between looking whether a server is up."""
TRIAL_TOKENS = 4
NO_SUCH_ROUTE = (404, 405)


async def open_teacher(
    settings: TeacherSettings,
    *,
    model_folder: Path,
    renderer: TextCodec,
    api_key: str | None,
    temperatures: Sequence[float],
    wait_s: float,
) -> HttpTeacher:
    """The teacher at `client.base_url`, once all of its servers are up, which may take `wait_s` seconds, and have shown
    that they serve it, read text as the policy does, and score at each of `temperatures`, at which the run samples.

    `model_folder` and `renderer` are the policy's. Raises TeacherRefused with the reason.
    """
    name, client = settings.model.name, settings.client
    if name is None or not client.base_url:
        raise ValueError(
            f"teacher_model.model.name is {name} and client.base_url of it is {client.base_url}, expected both: "
            "`grpo` starts a teacher and fills in its address, grpo-orch alone must be given one"
        )
    servers = [url.rstrip("/").removesuffix("/v1") for url in client.base_url]
    folder = tokenizer_folder(name)
    infos = await _infos(servers, api_key=api_key, try_s=client.try_timeout_s, wait_s=wait_s)
    teacher = HttpTeacher(
        servers,
        _endpoint(infos, name, folder),
        api_key=api_key,
        timeout_s=client.timeout,
        try_s=client.try_timeout_s,
        retries=client.retries,
        num_parallel=client.max_concurrent_requests,
    )
    try:
        await teacher.inspect()
        ours = Vocabulary.of_folder(model_folder)
        if folder is None:
            await teacher.check_vocabulary(probes(ours, renderer))
        else:
            check_same(ours, Vocabulary.of_folder(folder), f"the teacher {name}")
        row = np.array(sorted(ours.tokens)[:TRIAL_TOKENS], np.int32)
        await teacher.check_scoring(row, sorted(set(temperatures)))
    except BaseException:
        await teacher.close()
        raise
    teacher.counts = TeacherCounts()
    return teacher


def tokenizer_folder(name: str) -> Path | None:
    """Where the files of a model's tokenizer are on this machine: `name` itself where it is a folder, or its snapshot
    in the local Hugging Face cache. Nothing is fetched: a teacher's weights are large, and its server has them."""
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


def _endpoint(infos: dict[str, PolicyInfo | None], name: str, folder: Path | None) -> Endpoint:
    """How to ask servers that said this about themselves. Raises TeacherRefused where they differ, or serve another
    model than the one that is on this machine."""
    ours = [server for server, info in infos.items() if info is not None]
    if not ours:
        return CompletionsEndpoint(model=name)
    if len(ours) < len(infos):
        others = sorted(infos.keys() - set(ours))
        raise TeacherRefused(
            "refused",
            f"the teacher's servers {', '.join(ours)} are grpo-infer and {', '.join(others)} are not; serve it by one "
            "of the two kinds alone",
        )
    if folder is not None and any(folder.glob("*.safetensors")):
        expected = base_identity(folder)
        for server, info in infos.items():
            if info is not None and info.base_model not in (None, expected):
                raise TeacherRefused(
                    "refused",
                    f"the teacher's server {server} serves a model with identity {info.base_model}, expected "
                    f"{expected} of teacher_model.model.name = {name} ({folder}); start it with that model, or name "
                    "the one that it serves",
                )
    return PolicyEndpoint(version=None)


# --- waiting for servers ---


async def _infos(
    servers: Sequence[str], *, api_key: str | None, try_s: float, wait_s: float
) -> dict[str, PolicyInfo | None]:
    """What each server says about itself where it is a grpo-infer, else None, as soon as all are up."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    deadline_s = asyncio.get_running_loop().time() + wait_s
    timeout = aiohttp.ClientTimeout(total=try_s, sock_connect=min(CONNECT_TIMEOUT_S, try_s))
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        found = await asyncio.gather(*(_info(session, server, deadline_s, wait_s) for server in servers))
    return dict(zip(servers, found, strict=True))


async def _info(session: aiohttp.ClientSession, server: str, deadline_s: float, wait_s: float) -> PolicyInfo | None:
    last = "no answer"
    try:
        async with asyncio.timeout_at(deadline_s):
            while True:
                try:
                    return await _asked(session, server)
                except TryAgain as error:
                    last = str(error)
                await asyncio.sleep(PAUSE_S)
    except TimeoutError:
        raise TeacherRefused(
            "down",
            f"waited {wait_s:g} s for the teacher's server {server} to come up: {last}; start it, or mend "
            "teacher_model.client.base_url",
        ) from None


async def _asked(session: aiohttp.ClientSession, server: str) -> PolicyInfo | None:
    """Raises TryAgain while it is not up, and TeacherRefused where it is something else."""
    path = PolicyEndpoint.about
    try:
        async with session.get(server + path, allow_redirects=False) as response:
            data = await body_of(response, BYTES_BESIDE)
            if response.status in NO_SUCH_ROUTE:
                return None
            if response.status != 200:
                raise of_status(response.status, path, data, None)
            return decoded(data, PolicyInfo)
    except TeacherRefused as error:
        raise TeacherRefused(error.reason, f"the teacher's server {server}: {error}") from error
    except (aiohttp.ClientResponseError, aiohttp.InvalidURL) as error:
        raise TeacherRefused(
            "nonsense", f"the teacher's server {server} does not answer as HTTP would: {text_of(error)}"
        ) from error
    except TimeoutError:
        raise TryAgain("slow", f"{path} was not answered in time") from None
    except (aiohttp.ClientError, OSError) as error:
        raise TryAgain("down", text_of(error)) from None
