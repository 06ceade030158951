"""An environment worker: one environment, and the rollouts of it that run, all on one event loop."""

import asyncio
import contextlib
import copy
import functools
import gc
import hashlib
import logging
import os
import resource
import signal
import threading
import traceback
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvloop
import zmq
import zmq.asyncio
from grpo.orchestrator.rollouts.clock import OwnTimeout, no_exit, num_left_calls, waiting
from grpo.orchestrator.rollouts.context import ContextFull
from grpo.orchestrator.rollouts.environment import Environment, episode_of, is_single_turn, roles_of
from grpo.orchestrator.rollouts.episode import outcome_of, reason_of, run_episode, score_answer
from grpo.orchestrator.rollouts.messages import messages_of
from grpo.orchestrator.rollouts.registry import make_environment
from grpo.orchestrator.rollouts.rubric import RewardNotFinite
from grpo.orchestrator.rollouts.state import EpisodeState, Reply
from grpo.orchestrator.workers.protocol import (
    ALIVE_INTERVAL_S,
    PROTOCOL,
    Alive,
    AnyCall,
    CallRefused,
    Cancel,
    EnvironmentInfo,
    Failed,
    Load,
    LoadDataset,
    Prompts,
    RunEpisode,
    Sample,
    Sampled,
    Score,
    StoreReply,
    ToWorker,
    Values,
    Withdraw,
    decode_to_worker,
    encode,
    encode_checked,
    frame_of,
    open_socket,
)
from grpo.orchestrator.workers.trial import Watched, reason_of_trial
from grpo.transport.errors import UserError
from grpo.transport.logs import start_log

STACK_BYTES = 2 << 20
"""The stack of a thread. All of it counts as allocated from the beginning, which `memory_gb` limits."""
MAX_LEFT = 8
"""Rollouts and threads that nobody waits for and that do not end; a worker with so many ends."""
MAX_MESSAGE_CHARACTERS = 20_000
PART_BYTES = 4 << 20
"""Bytes of prompts that are sent at once, or few more."""
RESERVE_BYTES = 64 << 20
"""Memory beyond the limit, for the end of a worker that has used up its own."""
IDENTITY_BYTES = 12
"""Enough that among a thousand million examples no two share one by chance."""


class Worker:
    """Serves one orchestrator.

    Consumes what it sends. Each job of a RunEpisode or Score is answered by one Outcome or Failed, whatever user code
    does. The messages of one turn of the event loop go out together.
    """

    def __init__(self, socket: zmq.asyncio.Socket, only: str = "") -> None:
        """`only`: the one environment that may be asked for; empty for any."""
        self._socket, self._only = socket, only
        self._environment: Environment | None = None
        self._timeout_s = 0.0
        self._splits: dict[str, Sequence[Mapping[str, Any]]] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        """Rollouts by job."""
        self._replies: dict[tuple[int, int], asyncio.Future[Sampled | StoreReply | CallRefused]] = {}
        """Replies that calls wait for, by job and call."""
        self._left: set[asyncio.Task[EpisodeState]] = set()
        """Code of rollouts that are over, which has been told to end."""
        self._is_out_of_memory = False
        self._outgoing: list[bytes] = []

    async def serve(self) -> None:
        """Ends only with the process, or where the orchestrator says something that nobody understands."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._say_alive())
            while True:
                for message in decode_to_worker(await self._socket.recv()):
                    self._take(message)

    # --- messages ---

    def send(self, data: bytes) -> None:
        """Sends a message, with all that is said at the same time."""
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(data)

    def _flush(self) -> None:
        messages, self._outgoing = self._outgoing, []
        self._socket.send(frame_of(*messages))

    async def _say_alive(self) -> None:
        num_left = 0
        while True:
            before, num_left = num_left, num_left_calls() + len(self._left)  # many may be just about to end
            if self._is_out_of_memory or min(before, num_left) >= MAX_LEFT:
                os.kill(os.getpid(), signal.SIGKILL)  # its other rollouts begin once more elsewhere
            self.send(encode(Alive(protocol=PROTOCOL)))
            await asyncio.sleep(ALIVE_INTERVAL_S)

    def _take(self, message: ToWorker) -> None:
        match message:
            case RunEpisode():
                self._begin(message, 1)
            case Score():
                self._begin(message, len(message.texts))
            case Cancel():
                if (running := self._running.get(message.job)) is not None:
                    running.cancel()
            case Load() | LoadDataset():
                try:
                    answer = self._load(message) if isinstance(message, Load) else self._prompts(message)
                    answer.job = message.job
                    self.send(encode(answer))
                except BaseException as error:  # user code may raise even SystemExit
                    self.send(encode(self._failed(message.job, error)))
            case Sampled() | StoreReply() | CallRefused():
                reply = self._replies.pop((message.job, message.call), None)
                if reply is not None and not reply.done():
                    reply.set_result(message)

    async def reply_to(self, call: AnyCall) -> Any:
        """Returns the orchestrator's reply; the wait is not the rollout's own time. Raises CancelledError in code of a
        rollout that is over."""
        if call.job not in self._running:
            raise asyncio.CancelledError("the rollout is over, and something that it started goes on")
        key = call.job, call.call
        reply = self._replies[key] = asyncio.get_running_loop().create_future()
        try:
            self.send(encode_checked(call))
            with waiting(restart=True):
                return await reply
        except asyncio.CancelledError:
            if isinstance(call, Sample) and call.job in self._running:
                self.send(encode(Withdraw(job=call.job, call=call.call)))
            raise
        finally:
            self._replies.pop(key, None)

    # --- the environment ---

    def _load(self, load: Load) -> EnvironmentInfo:
        if self._only and self._only != load.env_id:
            raise ValueError(
                f"env.id is {load.env_id!r}, and the server at env.address serves {self._only!r}; let them agree"
            )
        if load.memory_bytes is not None:
            limit_memory(load.memory_bytes)
        environment = self._environment = make_environment(load.env_id, load.args)
        self._episode, self._timeout_s = episode_of(environment), load.timeout_s
        stores, pools = dict(environment.stores), dict(environment.pools)
        return EnvironmentInfo(
            single_turn=is_single_turn(environment), roles=roles_of(environment), stores=stores, pools=pools
        )

    def _prompts(self, request: LoadDataset) -> Prompts:
        """Returns as many prompts as fit into a frame. Examples are looked at one by one: a dataset need not hold them
        all in memory."""
        examples, hash_keys = self._examples(request.split), request.hash_keys
        prompts, solutions, identities, num_bytes = list[bytes](), list[bytes](), list[str](), 0
        for index in range(request.begin, len(examples)):
            example = examples[index]
            prompt = messages_of(example, index)
            prompts.append(_encode(prompt))
            solutions.append(_encode(str(example["solution"])) if "solution" in example else _NO_TEXT)
            if hash_keys:
                identities.append(identity_of({"task": request.task, **example, "prompt": prompt}, hash_keys, index))
            num_bytes += len(prompts[-1]) + len(solutions[-1])
            if num_bytes > PART_BYTES:
                break
        return Prompts(
            num_examples=len(examples),
            prompts=_values(prompts),
            identities="".join(identities).encode(),
            solutions=_values(solutions),
        )

    def _examples(self, split: str) -> Sequence[Mapping[str, Any]]:
        if (examples := self._splits.get(split)) is None:
            assert self._environment is not None
            examples = self._splits[split] = self._environment.dataset(split)
        return examples

    def _example(self, run: RunEpisode | Score) -> Mapping[str, Any]:
        """Raises ValueError where it is another one than the orchestrator knows."""
        examples = self._examples(run.split)
        prompt = messages_of(examples[run.index], run.index) if run.index < len(examples) else None
        if prompt != run.prompt:
            raise ValueError(
                f"example {run.index} of dataset({run.split!r}) has the prompt {prompt!r}, and had {run.prompt!r} "
                "before; it must be the same at every call: seed what it draws at random"
            )
        return examples[run.index]

    # --- one rollout ---

    def _begin(self, request: RunEpisode | Score, num: int) -> None:
        find = functools.cache(partial(self._example, request))  # all of them have the same
        for place in range(num):
            self._running[request.job + place] = asyncio.create_task(self._roll_out(request, place, find))

    async def _roll_out(self, request: RunEpisode | Score, place: int, find: Callable[[], Mapping[str, Any]]) -> None:
        """Rolls out an episode, or scores the answer at `place`. Whatever user code raises becomes an answer. What it
        does when it is told to end is not waited for."""
        episode: asyncio.Task[EpisodeState] | None = None
        example: Mapping[str, Any] = {}
        is_trial, job = isinstance(request, Score) and request.trial, request.job + place
        try:
            async with OwnTimeout(self._timeout_s) as timeout:
                example = Watched(_copy_of(find())) if is_trial else _copy_of(find())
                if isinstance(request, Score):
                    running = self._score(request, place, example)
                else:
                    running = self._run_episode(request, example)
                episode = asyncio.create_task(no_exit(running))
                state = await asyncio.shield(episode)
            outcome = outcome_of(state)
            outcome.job = job
            data = encode_checked(outcome)
        except BaseException as error:
            failed = self._failed(job, error)
            if timeout.expired():
                message = f"the environment took longer than reward_timeout_s = {self._timeout_s:g} s"
                failed = Failed(job=job, reason="env_timeout", message=message)
            elif is_trial:
                failed.reason = reason_of_trial(error, example, self._examples(request.split)) or failed.reason
            data = encode(failed)
        del self._running[job]
        self.send(data)
        if episode is not None and not episode.done():
            self._left.add(episode)
            episode.add_done_callback(self._left.discard)
            episode.cancel()

    async def _run_episode(self, run: RunEpisode, example: Mapping[str, Any]) -> EpisodeState:
        assert self._environment is not None
        return await run_episode(
            self._episode,
            partial(self._call, run.job),
            example=example,
            split=run.split,
            seed=run.seed,
            episodes=self._environment.episodes,
            stores=self._environment.stores,
            pools=self._environment.pools,
            score=run.score,
        )

    async def _score(self, score: Score, place: int, example: Mapping[str, Any]) -> EpisodeState:
        [role] = self._episode.roles
        answer = Reply(
            role=role.id,
            messages=tuple(dict(message) for message in score.prompt),
            text=score.texts[place],
            opening=score.opening,
            finish_reason=score.finish_reasons[place],
            num_tokens=score.num_tokens[place],
            index=0,
            call=0,
        )
        backend = partial(self._call, score.job + place)
        seed = score.seeds[place]
        return await score_answer(self._episode, backend, answer, example=example, split=score.split, seed=seed)

    async def _call(self, job: int, call: AnyCall) -> Any:
        call.job = job
        return await self.reply_to(call)

    def _failed(self, job: int, error: BaseException) -> Failed:
        if isinstance(error, MemoryError):
            self._is_out_of_memory = True
            limit_memory(RESERVE_BYTES)  # what user code keeps cannot be given back: the worker is about to end
        return Failed(job=job, reason=reason_of(error), message=_told(error))


_encode, _encode_fields = msgspec.msgpack.Encoder().encode, msgspec.json.Encoder(order="deterministic").encode
_NO_TEXT = _encode("")


def _values(encoded: Sequence[bytes]) -> Values:
    return Values(data=b"".join(encoded), lengths=array("I", map(len, encoded)).tobytes())


_IMMUTABLE = (str, int, float, bool, type(None))


def _copy_of(example: Mapping[str, Any]) -> Mapping[str, Any]:
    is_flat = type(example) is dict and all(type(value) in _IMMUTABLE for value in example.values())
    return dict(example) if is_flat else copy.deepcopy(example)


SPEAKS_FOR_ITSELF = (RewardNotFinite, ContextFull, UserError)
"""Errors that say all without a traceback."""


def _told(error: BaseException) -> str:
    """An exception with its traceback, its beginning and its end; it may repeat an endless text."""
    message = str(error) if isinstance(error, SPEAKS_FOR_ITSELF) else "".join(traceback.format_exception(error))
    if len(message) > MAX_MESSAGE_CHARACTERS:
        half = MAX_MESSAGE_CHARACTERS // 2
        message = f"{message[:half]}\n[{len(message) - 2 * half} characters left out]\n{message[-half:]}"
    return message.encode(errors="replace").decode()


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
    """Returns a text that is the same for examples with the same values for `keys`, and different for others. Raises
    ValueError for one that has no such field, or something in it that cannot be compared from run to run."""
    if missing := [key for key in keys if key not in example]:
        raise ValueError(
            f"example {index} has no {missing[0]!r}, which buffer.hash_keys names; it has {', '.join(sorted(example))}"
        )
    try:
        values = _encode_fields({key: example[key] for key in keys})
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise ValueError(
            f"example {index} cannot be known by {', '.join(keys)}: {error}; name fields of plain data in "
            "buffer.hash_keys"
        ) from None
    return hashlib.blake2b(values, digest_size=IDENTITY_BYTES).hexdigest()


def serve(address: str, only: str) -> None:
    """Connects to whoever started this process, and serves it until the process ends."""
    start_log(level=logging.WARNING)
    threading.stack_size(STACK_BYTES)
    gc.freeze()  # what is there stays; looking through it again and again would hold up the loop
    gc.set_threshold(20_000, 20, 20)  # thousands of rollouts in flight are no garbage either

    async def main() -> None:
        socket = open_socket(zmq.DEALER, zmq.asyncio.Context())
        socket.connect(address)
        await Worker(socket, only).serve()

    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(main())
