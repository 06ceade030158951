"""The process of one environment: `python -m orchestrator.workers.child FD PARENT [ENV_ID]`.

The main thread runs user code, one request at a time; a second thread reads requests and ends the process when the
orchestrator's end of the socket closes. The kernel kills the process too when the one that started it dies. With
ENV_ID, as an environment server gives it, no other environment can be asked for.
"""

import asyncio
import hashlib
import json
import logging
import os
import resource
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.envs.base import Environment, episode_of, roles_of
from orchestrator.envs.registry import make_environment
from orchestrator.episodes.messages import messages_of
from orchestrator.episodes.rubric import RewardNotFinite
from orchestrator.workers.child_marker import Marker
from orchestrator.workers.child_output import limit_output
from orchestrator.workers.child_stream import Inbox, Outbox, read_requests
from orchestrator.workers.playing import serve_episodes, shortened
from orchestrator.workers.wire import (
    Answer,
    Dataset,
    Load,
    Loaded,
    Prompts,
    Raised,
    Request,
    RoleInfo,
    Scored,
    ScoreOne,
    frame,
)
from transport.parent import end_with

IDENTITY_BYTES = 12
"""Enough that among a thousand million examples no two share one by chance."""


class Host:
    """One environment and the splits that have been asked for."""

    def __init__(self, loop: asyncio.AbstractEventLoop, only: str | None = None) -> None:
        """`only`: the one environment that may be asked for."""
        self._loop, self._only = loop, only
        self.environment: Environment | None = None
        self.plays = False
        """Whether the environment is there, and from now on rolls out episodes."""
        self._splits: dict[str, Sequence[Mapping[str, Any]]] = {}

    def answer(self, request: Request) -> bytes:
        """A frame. Whatever user code raises becomes an answer, too, and so does what cannot be sent."""
        try:
            return frame(self._answer(request))
        except RewardNotFinite as error:
            raised = Raised(reason="reward_not_finite", message=shortened(str(error)))
        except MemoryError as error:
            traceback.clear_frames(error.__traceback__)
            raised = Raised(reason="env_memory", message=shortened(traceback.format_exc()))
        except BaseException:  # user code may raise even SystemExit; the orchestrator decides what that means
            raised = Raised(reason="env_error", message=shortened(traceback.format_exc()))
        return frame(raised)

    def _answer(self, request: Request) -> Answer:
        match request:
            case Load():
                return self._load(request)
            case Dataset():
                return self._prompts(request)
            case ScoreOne():
                return self._score(request)
            case _:
                raise ValueError(f"a process that scores single answers was sent a {type(request).__name__}")

    def _load(self, load: Load) -> Loaded:
        if self._only not in (None, load.env_id):
            raise ValueError(
                f"env.id is {load.env_id!r}, and the server at env.address serves {self._only!r}; let them agree"
            )
        if load.memory_bytes is not None:
            limit_memory(load.memory_bytes)
        self.environment = make_environment(load.env_id, load.args)
        episode = episode_of(self.environment)
        if load.episodes and episode is None:
            raise ValueError(f"{load.env_id} has no episode to roll out, only a rubric for single answers")
        self.plays = load.episodes
        return Loaded(
            episodic=episode is not None,
            roles=[
                RoleInfo(id=role.id, temperature=role.temperature, max_tokens=role.max_tokens)
                for role in roles_of(self.environment)
            ],
            stores=dict(self.environment.stores),
        )

    def _prompts(self, request: Dataset) -> Prompts:
        assert self.environment is not None
        examples = self.environment.dataset(request.split)
        self._splits[request.split] = examples
        prompts = [messages_of(examples[index], index) for index in range(len(examples))]
        identities = [
            identity_of({"task": request.task, **examples[index], "prompt": prompt}, request.hash_keys, index)
            for index, prompt in enumerate(prompts)
            if request.hash_keys
        ]
        return Prompts(prompts=prompts, identities=identities)

    def _score(self, request: ScoreOne) -> Scored:
        assert self.environment is not None
        example = self._splits[request.split][request.index]
        score = self._loop.run_until_complete(self.environment.rubric.score(request.completion, example))
        return Scored(reward=score.reward, accuracy=score.accuracy, metrics=dict(score.metrics))


def limit_memory(num_bytes: int) -> None:
    """Lets this process allocate so much more than it has by now; further allocations raise MemoryError.

    The soft limit alone: sandboxes have limits of their own, which may be higher.
    """
    status = Path("/proc/self/status").read_text()
    [has_kib] = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData:")]
    limit, hard = (has_kib << 10) + num_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


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


def main() -> None:
    """Serves one orchestrator until it is gone."""
    end_with(int(sys.argv[2]))
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    marker = Marker.from_environment()
    log_to(limit_output())
    inbox = Inbox()
    threading.Thread(target=read_requests, args=(connection, inbox), daemon=True).start()
    loop = asyncio.new_event_loop()
    host = Host(loop, only=sys.argv[3] if len(sys.argv) > 3 else None)
    connection.sendall(frame(Loaded()))
    while not host.plays:
        connection.sendall(host.answer(inbox.get()))
    assert host.environment is not None
    serve_episodes(host.environment, inbox, Outbox(connection, loop), marker, loop)


def log_to(descriptor: int) -> None:
    """What our own code logs does not go the way of what user code prints, which may be cut short."""
    handler = logging.StreamHandler(os.fdopen(descriptor, "w"))
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("orchestrator")
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    logger.propagate = False


if __name__ == "__main__":
    main()
