"""The process of one environment: `python -m orchestrator.workers.child FD PARENT [ENV_ID]`.

The main thread runs user code, one request at a time; a second thread reads requests and ends the process when the
orchestrator's end of the socket closes. The kernel kills the process too when the one that started it dies. With
ENV_ID, as an environment server gives it, no other environment can be asked for.
"""

import asyncio
import contextlib
import ctypes
import hashlib
import json
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from orchestrator.envs.base import Environment
from orchestrator.envs.registry import make_environment
from orchestrator.episodes.rubric import RewardNotFinite
from orchestrator.workers.wire import (
    HEADER,
    Answer,
    Dataset,
    Load,
    Loaded,
    Prompts,
    Raised,
    Request,
    Scored,
    frame,
)

PR_SET_PDEATHSIG = 1
IDENTITY_BYTES = 12
"""Enough that among a thousand million examples no two share one by chance."""


class Host:
    """One environment and the splits that have been asked for."""

    def __init__(self, only: str | None = None) -> None:
        """`only`: the one environment that may be asked for."""
        self._only = only
        self._environment: Environment | None = None
        self._splits: dict[str, Sequence[Mapping[str, Any]]] = {}
        self._loop = asyncio.new_event_loop()

    def answer(self, request: Request) -> Answer:
        """Whatever user code raises becomes an answer, too."""
        try:
            return self._answer(request)
        except RewardNotFinite as error:
            return Raised(reason="reward_not_finite", message=str(error))
        except BaseException:  # user code may raise even SystemExit; the orchestrator decides what that means
            return Raised(reason="env_error", message=traceback.format_exc())

    def _answer(self, request: Request) -> Answer:
        if isinstance(request, Load):
            if self._only not in (None, request.env_id):
                raise ValueError(
                    f"env.id is {request.env_id!r}, and the server at env.address serves {self._only!r}; let them agree"
                )
            self._environment = make_environment(request.env_id, request.args)
            return Loaded()
        assert self._environment is not None
        if isinstance(request, Dataset):
            examples = self._environment.dataset(request.split)
            self._splits[request.split] = examples
            prompts = [messages_of(examples[index], index) for index in range(len(examples))]
            identities = [
                identity_of({"task": request.task, **examples[index], "prompt": prompt}, request.hash_keys, index)
                for index, prompt in enumerate(prompts)
                if request.hash_keys
            ]
            return Prompts(prompts=prompts, identities=identities)
        example = self._splits[request.split][request.index]
        score = self._loop.run_until_complete(self._environment.rubric.score(request.completion, example))
        return Scored(reward=score.reward, accuracy=score.accuracy, metrics=dict(score.metrics))


def messages_of(example: Mapping[str, Any], index: int) -> list[dict[str, str]]:
    """The prompt of an example as chat messages. Raises ValueError that says what an example must look like."""
    prompt = example.get("prompt")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, Sequence) and prompt and all(_is_message(message) for message in prompt):
        return [{"role": message["role"], "content": message["content"]} for message in prompt]
    raise ValueError(
        f"example {index} has prompt = {prompt!r}, expected a text or a list of messages with role and content"
    )


def identity_of(example: Mapping[str, Any], keys: Sequence[str], index: int) -> str:
    """The same text wherever and whenever an example has the same values for `keys`, and another one otherwise. Raises
    ValueError for one that has no such field, or something in it that cannot be compared from run to run."""
    if missing := [key for key in keys if key not in example]:
        raise ValueError(
            f"example {index} has no {missing[0]!r}, which buffer.hash_keys names; it has {', '.join(sorted(example))}"
        )
    try:
        values = json.dumps({key: example[key] for key in keys}, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"example {index} cannot be known by {', '.join(keys)}: {error}; name fields of plain data in "
            "buffer.hash_keys"
        ) from None
    return hashlib.blake2b(values.encode(), digest_size=IDENTITY_BYTES).hexdigest()


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def read_requests(connection: socket.socket, requests: "queue.SimpleQueue[Request]") -> None:
    """Puts requests into the queue; ends the whole process at the end of the stream, also where it is cut off."""
    decoder = msgspec.msgpack.Decoder(Request)
    stream = connection.makefile("rb")
    with contextlib.suppress(ConnectionError, TimeoutError):
        while len(header := stream.read(HEADER.size)) == HEADER.size:
            requests.put(decoder.decode(stream.read(HEADER.unpack(header)[0])))
    os._exit(0)


def main() -> None:
    """Serves one orchestrator until it is gone."""
    parent = int(sys.argv[2])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the process that started this one is gone")
    connection = socket.socket(fileno=int(sys.argv[1]))
    requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
    threading.Thread(target=read_requests, args=(connection, requests), daemon=True).start()
    host = Host(only=sys.argv[3] if len(sys.argv) > 3 else None)
    connection.sendall(frame(Loaded()))
    while True:
        connection.sendall(frame(host.answer(requests.get())))


if __name__ == "__main__":
    main()
