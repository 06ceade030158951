"""Works through the commands of all models, in one thread, a pass at a time, which is a micro-batch of one model or of
several that wait together.

Whoever's turn was longest ago is next, tenants first and then their models. Each model's commands are done in the order
of their numbers. A model is made from its last state on disk and the
commands since, so that a killed service goes on where it was, and a model that rests can leave the memory.
"""

import itertools
import json
import logging
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grpo.service.errors import RankGone, Refused
from grpo.service.log import Answer, Command, CommandLog, StepRow
from grpo.service.recorder import Recorder
from grpo.service.training import AdapterShape, Base, Pass, TrainedModel, saved_shape
from grpo.service.wire import parse, read_forward_backward
from grpo.transport.errors import StorageError

log = logging.getLogger(__name__)

MAX_OPEN = 64
"""Models in memory. Beyond them the one that has rested longest is closed, and made again when it is asked for."""
CHECKPOINT_STEPS = 8
"""Optimizer steps between two states on disk."""
MISSING_S = 300.0
"""How long commands wait for one with a lower number that has not come."""
MISSING = "missing"
"""The end of a command that was not done, because one with a lower number had not come."""
REPLAYED = frozenset({"create_model", "forward_backward", "optim_step", "load_weights"})
"""Commands that change a model, which are done again after a restart."""
DROP = "drop_gradients"
"""Stands in a replay for an `optim_step` that has dropped its gradients."""
SAVE_FOR_SAMPLER = "save_weights_for_sampler"
INFLIGHT = "inflight"
"""The kind of sampling sessions that all have the newest weights of their model that were saved so."""
KINDS = ("snapshot", INFLIGHT)
UNLOAD = "unload_model"
EXPIRED_S = 1.0
"""Between two looks for checkpoints whose time is over."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_FOLDERS = {
    "save_weights": "weights",
    "save_weights_external": "external_weights",
    SAVE_FOR_SAMPLER: "sampler_weights",
}
"""Kinds of commands that write a checkpoint, and the kind that its path names."""
JOIN_S = 0.02
"""How long a pass waits for models that were in the last ones and have nothing to do yet."""
RECENT_S = 0.5
"""How long after its last pass a model is waited for."""
Publish = Callable[[TrainedModel, Command, str], Future[int]]
"""Writes a model, which is in use, as a version with its canary, and begins to load it. The future is the version,
once the server has proved it."""


def _nothing() -> Future[None]:
    done: Future[None] = Future()
    done.set_result(None)
    return done


_Work = Generator[Pass | Future[Any], Any, Answer]


@dataclass(slots=True, eq=False)
class _Queue:
    """The commands of one model."""

    model_id: str
    tenant: str
    model: TrainedModel | None = None
    replayed: deque[Command] = field(default_factory=deque)
    """Answered ones since the model's last state, which are done again."""
    waiting: dict[int, Command] = field(default_factory=dict)
    """By number."""
    next_seq: int = 0
    since: float = field(default_factory=time.monotonic)
    """When something last came or was done."""
    work: tuple[Command, bool, _Work] | None = None
    waits_for: Pass | Future[Any] | None = None
    """What its work has asked for."""
    since_pass: float = 0.0
    """When it was last in a pass."""
    turn: int = 0
    """Number of its last turn."""
    last_step: Future[None] = field(default_factory=_nothing)
    """Done once its last step is on the disk, where the next one counts on from it."""
    steps_on_disk: int = 0

    def is_ready(self) -> bool:
        """Returns whether there is something to do."""
        if self.work is None and not self.replayed:
            command = self.waiting.get(self.next_seq)
            return command is not None and (command.kind != "optim_step" or self.last_step.done())
        return self.work is None or not isinstance(self.waits_for, Future) or self.waits_for.done()

    def begins_pass(self) -> bool:
        """Returns whether its next command asks for passes."""
        return self.work is None and not self.replayed and self.waiting[self.next_seq].kind == "forward_backward"


class Engine:
    """The thread that trains."""

    def __init__(
        self,
        base: Base,
        commands: CommandLog,
        folder: Path,
        *,
        recorder: Recorder,
        finished: Callable[[str], None],
        publish: Publish | None,
    ) -> None:
        """Keeps states and checkpoints below `folder`. `finished` is called with the id of each request that has
        ended, in the engine's thread. Without `publish` nothing is sampled."""
        self._base, self._log, self._folder = base, commands, folder
        self._recorder, self._finished, self._publish = recorder, finished, publish
        self._queues: dict[str, _Queue] = {}
        self._changed = threading.Condition()
        self._ending = False
        self._checkpoint: tuple[str, int] | None = None
        self._numbers = itertools.count(1)
        self._turns: dict[str, int] = {}
        """Number of the last turn of each tenant."""
        self._last_end = _nothing()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="training", daemon=True)

    def start(self) -> None:
        """Starts the thread, with what was waiting when the service ended."""
        for command in self._log.waiting((*sorted(REPLAYED), *_FOLDERS, UNLOAD)):
            self.submit(command)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after its micro-batch; what waits is done after the next start."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join(60.0)

    def check(self) -> None:
        """Raises what has ended the thread."""
        if self._failure is not None:
            raise self._failure

    def submit(self, command: Command) -> None:
        """Queues a command that is in the log."""
        with self._changed:
            queue = self._queues.get(command.target)
            if queue is None:
                queue = self._queues[command.target] = self._queue_of(command)
            if command.seq not in queue.waiting and (queue.work is None or queue.work[0].seq != command.seq):
                queue.waiting[command.seq] = command
            queue.since = time.monotonic()
            self._changed.notify()

    def is_next(self, model_id: str, seq: int) -> bool:
        """Returns whether a command of this number is what the model waits for."""
        with self._changed:
            queue = self._queues.get(model_id)
            return queue is None or (queue.work is None and queue.next_seq == seq)

    def state_folder(self, model_id: str) -> Path:
        """Returns where a model's last state is."""
        return self._folder / "states" / model_id

    def checkpoint_folder(self, path: str) -> Path:
        """Returns where the checkpoint `tinker://MODEL/KIND/NAME` is."""
        return self._folder / "checkpoints" / path.removeprefix("tinker://")

    def _queue_of(self, command: Command) -> _Queue:
        """Returns the commands since the model's last state, of which the finished ones are done again."""
        model_id = command.target
        queue, state = _Queue(model_id, command.tenant), self.state_folder(model_id)
        if (state / "state.json").exists():
            queue.next_seq = json.loads((state / "state.json").read_text())["seq"] + 1
        dropped = self._log.dropped(model_id)
        for command, status in self._log.commands(model_id, after=queue.next_seq - 1):
            if status == "waiting":
                queue.waiting[command.seq] = command
                continue
            queue.next_seq = command.seq + 1
            if command.seq in dropped:
                queue.replayed.append(replace(command, kind=DROP))
            elif status in ("done", "proto") and command.kind in REPLAYED:  # what has failed then is not done now
                queue.replayed.append(command)
        return queue

    def _run(self) -> None:
        try:
            self._take_turns()
            if self._base.others is not None:
                self._base.others.end()
        except Exception as error:
            self._failure = error

    def _take_turns(self) -> None:
        """The loop that takes turns among the models. Consumes queued commands. Waits for `submit`, and for what
        servers have been asked. Ends when the engine is closed, and with the log or a rank, which raise `LogFailed`
        and `RankGone`."""
        looked_s = -EXPIRED_S
        while True:
            if time.monotonic() > looked_s + EXPIRED_S:
                self._remove_expired()
                if self._base.others is not None:
                    self._base.others.keep()
                looked_s = time.monotonic()
            with self._changed:
                if not (ready := self._ready()) and not self._ending:
                    self._changed.wait(EXPIRED_S)
                if self._ending:
                    return
            if not ready:
                continue
            if not isinstance(ready[0].waits_for, Pass):
                self._turn(ready[0])
            if isinstance(ready[0].waits_for, Pass):
                self._pass(ready[0])

    def _remove_expired(self) -> None:
        """Removes checkpoints whose time is over, in the thread that also writes and reads them."""
        for path in self._log.expired():
            shutil.rmtree(self.checkpoint_folder(path), ignore_errors=True)
            self._log.forget_checkpoint(path)

    def _ready(self) -> list[_Queue]:
        """Returns the models with something to do, by whose turn was longest ago."""
        ready = []
        for queue in self._queues.values():
            if queue.is_ready():
                ready.append(queue)
            elif queue.work is None:
                self._give_up(queue)
        return sorted(ready, key=lambda queue: (self._turns.get(queue.tenant, 0), queue.turn))

    def _pass(self, first: _Queue) -> None:
        """Computes the pass that a model waits for, together with those of others that fit into it."""
        assert isinstance(first.waits_for, Pass)
        joined, asked = [first], [first.waits_for]
        until_s = time.monotonic() + JOIN_S
        while True:
            for queue in self._ready_to_join(joined):
                if queue.waits_for is None:
                    self._turn(queue)
                if isinstance(queue.waits_for, Pass) and self._base.can_join(asked, queue.waits_for):
                    joined.append(queue)
                    asked.append(queue.waits_for)
            with self._changed:
                left_s = until_s - time.monotonic()
                if left_s <= 0 or self._ending or not self._is_expected(joined):
                    break
                self._changed.wait(left_s)
        try:
            results: list[Any] = self._base.compute(asked)
        except RankGone:
            raise
        except Exception as error:
            results = [error] * len(joined)
        for queue, result in zip(joined, results, strict=True):
            queue.since_pass = time.monotonic()
            self._turn(queue, result)

    def _ready_to_join(self, joined: Sequence[_Queue]) -> list[_Queue]:
        with self._changed:
            others = [queue for queue in self._ready() if queue not in joined]
        return [queue for queue in others if isinstance(queue.waits_for, Pass) or queue.begins_pass()]

    def _is_expected(self, joined: Sequence[_Queue]) -> bool:
        """Returns whether a model that is not among these may soon ask for a pass: one that was in a pass just now, and
        has nothing to do."""
        recent_s = time.monotonic() - RECENT_S
        return any(
            queue.since_pass > recent_s and queue.work is None and not queue.is_ready()
            for queue in self._queues.values()
            if queue not in joined
        )

    def _give_up(self, queue: _Queue) -> None:
        """Fails commands that have waited too long for one with a lower number."""
        if not queue.waiting or time.monotonic() - queue.since < MISSING_S:
            return
        self._checkpoint = None
        for seq, command in sorted(queue.waiting.items()):
            message = f"seq_id {queue.next_seq} did not come within {MISSING_S:g} s, and seq_id {seq} follows it"
            self._end(command, _failed(message, state=MISSING))
        queue.next_seq = max(queue.waiting) + 1
        queue.waiting.clear()

    def _turn(self, queue: _Queue, result: Any = None) -> None:
        """Does a model's command up to the next pass, or to its end. `result` is that of the pass that it has waited
        for, or its error."""
        with self._changed:
            if queue.work is None:
                again = bool(queue.replayed)
                command = queue.replayed.popleft() if again else queue.waiting.pop(queue.next_seq)
                queue.work = command, again, self._work(queue, command)
            self._turns[queue.tenant] = queue.turn = next(self._numbers)
        command, again, work = queue.work
        self._checkpoint, queue.waits_for = None, None
        try:
            queue.waits_for = work.throw(result) if isinstance(result, Exception) else work.send(result)
            if isinstance(queue.waits_for, Future):
                queue.waits_for.add_done_callback(self._notify)
            return
        except StopIteration as done:
            answer: Answer = done.value
        except Refused as error:
            answer = _failed(str(error))
        except Exception as error:
            log.exception("%s of %s", command.kind, command.target)
            answer = _failed(f"{type(error).__name__}: {error}", state="broken")
        queue.work, queue.since = None, time.monotonic()
        step = None
        if not again:
            queue.next_seq = command.seq + 1
            step = self._recorder.row(command, queue.model, answer)
            self._end(command, answer, step)
            if command.kind == "optim_step":
                queue.last_step = self._last_end
                queue.last_step.add_done_callback(self._notify)
        if queue.model is not None and command.kind == "optim_step":
            self._recorder.stepped(command, queue.model, step)
        try:
            self._keep_state(queue, command)
        except StorageError:
            log.exception("the state of %s is not kept; its commands stay in the log", command.target)
        self._close_resting()

    def _notify(self, _: Future[Any]) -> None:
        with self._changed:
            self._changed.notify()

    def _keep_state(self, queue: _Queue, command: Command) -> None:
        """Writes the model's state to disk after some steps, and after what it has loaded, which may change there."""
        model = queue.model
        if model is None or model.has_gradients or command.kind not in ("optim_step", "load_weights"):
            return
        if command.kind == "load_weights" or model.num_steps >= queue.steps_on_disk + CHECKPOINT_STEPS:
            self._last_end.result()
            model.save(self.state_folder(command.target), seq=command.seq)
            self._log.forget_bodies(command.target, up_to=command.seq)
            queue.steps_on_disk = model.num_steps

    def _end(self, command: Command, answer: Answer, step: StepRow | None = None) -> None:
        """Records the answer. Whoever waits for it is told once it is on the disk."""
        self._last_end = self._log.finish(command, answer, checkpoint=self._checkpoint, step=step)
        self._last_end.add_done_callback(lambda _: self._finished(command.request_id))
        if self._checkpoint is not None:
            self._last_end.result()

    def _close_resting(self) -> None:
        """Closes models beyond `MAX_OPEN`, those that have rested longest first."""
        with self._changed:
            open_queues = [queue for queue in self._queues.values() if queue.model is not None]
            open_queues.sort(key=lambda queue: queue.turn)
            for queue in open_queues[: max(0, len(open_queues) - MAX_OPEN)]:
                if queue.work is None and not queue.waiting and queue.model is not None:
                    queue.model.close()
                    del self._queues[queue.model_id]

    # --- the commands ---

    def _work(self, queue: _Queue, command: Command) -> _Work:
        if command.kind == "create_model":
            asked = json.loads(command.body)
            if (kind := (asked.get("optimizer_config") or {}).get("type", "adamw")) != "adamw":
                raise Refused(f"optimizer_config.type is {kind!r:.40}; this service has adamw")
            queue.model = TrainedModel(self._base, AdapterShape.of(asked.get("lora_config") or {}))
            return _done({"type": "create_model", "model_id": command.target})
        if command.kind == UNLOAD:
            if queue.model is not None:
                queue.model.close()
                queue.model = None
            return _done({"type": UNLOAD, "model_id": command.target})
        if command.kind == "load_weights":
            return self._load(queue, json.loads(command.body), command)
        model = self._model(queue)
        if command.kind == DROP:
            model.drop_gradients()
            return _done({})
        if command.kind == "forward_backward":
            limits: Any = {"vocab_size": self._base.vocab_size, "max_tokens": self._base.max_tokens}
            request = read_forward_backward(parse(command.body), **limits)
            return Answer(state="proto", content=(yield from model.forward_backward(request)))
        asked = json.loads(command.body)
        if command.kind == "optim_step":
            if "adam_params" not in asked:
                raise Refused(f"optim_step has {sorted(asked)}, expected adam_params; this service has AdamW alone")
            try:
                self._recorder.prove(command, model, again=queue.work is not None and queue.work[1])
            except Refused:
                model.drop_gradients()
                raise
            return _done({"metrics": model.optim_step(asked["adam_params"])})
        if command.kind in ("save_weights", "save_weights_external"):
            if asked.get("age_encryption_recipients"):
                raise Refused("age_encryption_recipients: this service does not encrypt what it exports")
            path = self._path(command, _FOLDERS[command.kind], asked)
            self._base.use(model.policy)
            self._checkpoint = path, model.save(self.checkpoint_folder(path), seq=command.seq, canary=True)
            return _done({"type": command.kind, "path": path})
        return (yield from self._save_for_sampler(model, asked, command))

    def _save_for_sampler(self, model: TrainedModel, asked: dict[str, Any], command: Command) -> _Work:
        """Publishes the adapter, and lets others compute until the server has proved it."""
        path = self._path(command, _FOLDERS[command.kind], asked)
        number = asked.get("sampling_session_seq_id")
        if self._publish is None and number is not None:
            raise Refused("this service was started without sampling (--no_sampling)")
        if (kind := asked.get("kind", "snapshot")) not in KINDS:
            raise Refused(f"kind is {kind!r:.40}, expected {' or '.join(KINDS)}")
        if is_inflight := kind == INFLIGHT:
            if number is None:
                raise Refused("kind is 'inflight' and sampling_session_seq_id is missing; a checkpoint is a snapshot")
            path = f"tinker://{command.target}/{INFLIGHT}"
        self._base.use(model.policy)
        if self._publish is None:
            size = model.save(self.checkpoint_folder(path), seq=command.seq, canary=True, optimizer=False)
            self._checkpoint = path, size
            return _done({"type": command.kind, "path": path})
        proved, checkpoint = self._publish(model, command, path), None
        if number is None:  # what a session alone samples from is no checkpoint; a version has its canary itself
            checkpoint = path, model.save(self.checkpoint_folder(path), seq=command.seq, optimizer=False)
        yield proved
        version = proved.result()
        if number is None:
            self._checkpoint = checkpoint
            return _done({"type": command.kind, "path": path})
        sampler = f"{command.target.partition(':train:')[0]}:sample:{int(number)}"
        session_of = (path, None) if is_inflight else (None, version)
        self._log.add_sampler(sampler, command.tenant, *session_of)
        return _done({"type": command.kind, "path": None, "sampling_session_id": sampler})

    def _path(self, command: Command, kind: str, asked: dict[str, Any]) -> str:
        """Returns the path of a checkpoint that is to be written. Raises `Refused` for a name that cannot be one, or is
        taken."""
        name = asked.get("path") or f"{command.seq:06d}"
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise Refused(f"the checkpoint's name is {name!r:.120}, expected up to 100 letters, digits, -, _ and .")
        path = f"tinker://{command.target}/{kind}/{name}"
        if self._log.has_checkpoint(path, command.tenant) and not asked.get("overwrite"):
            raise Refused(f"{path} is there already; choose another name, or overwrite=True")
        return path

    def _load(self, queue: _Queue, asked: dict[str, Any], command: Command) -> Answer:
        """Loads a checkpoint into the model, which it makes where this is the model's first command."""
        if not self._log.has_checkpoint(asked["path"], command.tenant):
            raise Refused(f"path is {asked['path']!r:.160}, and there is no such checkpoint")
        folder = self.checkpoint_folder(asked["path"])
        if command.seq == 0:
            queue.model = TrainedModel(self._base, saved_shape(folder))
        self._model(queue).load(folder, optimizer=bool(asked["optimizer"]))
        return _done({"type": "load_weights", "path": asked["path"], "model_id": command.target})

    def _model(self, queue: _Queue) -> TrainedModel:
        """Returns the model, made from its last state on disk where it is not in memory."""
        if queue.model is None:
            folder = self.state_folder(queue.model_id)
            if not folder.exists():
                raise Refused(f"{queue.model_id} could not be created; the answer to its creation says why")
            queue.model = TrainedModel(self._base, saved_shape(folder))
            queue.model.load(folder, optimizer=True)
            queue.steps_on_disk = queue.model.num_steps
        return queue.model


def _done(content: dict[str, Any]) -> Answer:
    return Answer(state="done", content=json.dumps(content).encode())


def _failed(message: str, *, state: str = "failed") -> Answer:
    return Answer(state=state, content=message.encode())
