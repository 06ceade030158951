"""The trainer's loop: receive, update, publish, checkpoint."""

import logging
import math
from collections.abc import Sequence
from contextlib import suppress

from grpo.configs.train import TrainSettings
from grpo.trainer.batch import check_step, counts_of, num_signal_tokens
from grpo.trainer.checkpoint import Checkpointing, Resumed, restore
from grpo.trainer.colocate import check_exporter, while_exported
from grpo.trainer.distributed import ONE, Ranks
from grpo.trainer.errors import EndedEarly, NonFiniteError
from grpo.trainer.flops import peak_flops, step_flops
from grpo.trainer.memory import release_memory
from grpo.trainer.metrics import State, numbers_of, reduced, timed
from grpo.trainer.model import Policy
from grpo.trainer.objective import Objective, mean_over_steps
from grpo.trainer.optim import Optimizer, learning_rate, signal_factor
from grpo.trainer.publishing import Publishing
from grpo.trainer.traces import TrainedTokens
from grpo.transport.batches.filesystem import BatchReceiver
from grpo.transport.folders import step_folder
from grpo.transport.receipts import Receipt
from grpo.transport.records import MicroBatch, PolicySpec
from grpo.transport.run import RunFolder
from grpo.transport.shared_base import ImportedBase
from grpo.transport.status import PeerWatch, StatusFile
from grpo.transport.weights.store import PolicyPublisher

log = logging.getLogger(__name__)


class Trainer:
    """The training of one run, from version 0 or a checkpoint to the last step."""

    def __init__(
        self,
        settings: TrainSettings,
        policy: Policy,
        *,
        run_folder: RunFolder,
        spec: PolicySpec,
        receiver: BatchReceiver,
        publisher: PolicyPublisher | None,
        status: StatusFile,
        orchestrator: PeerWatch,
        imported: ImportedBase | None = None,
        ranks: Ranks = ONE,
    ) -> None:
        """Takes the base `imported` from a server if the policy computes on that, and a `publisher` on the main
        rank."""
        self._settings, self._policy, self._ranks, self._run_folder = settings, policy, ranks, run_folder
        self._receiver, self._status, self._orchestrator = receiver, status, orchestrator
        self._imported = imported
        self._optimizer = Optimizer(settings, policy.named_parameters, ranks)
        self._objective = Objective(policy, settings.loss, ranks, pack_tokens=settings.pack_tokens)
        self._traces = TrainedTokens(run_folder.path, settings.loss)
        self._publishing = Publishing(settings, policy, publisher, spec=spec, ranks=ranks, imported=imported)
        self._times_s: dict[str, float] = {}
        """How long the newest wait, step, version and checkpoint took, and when they began, as metrics."""
        self._state = policy, self._optimizer, self._objective.average
        self._checkpoints = Checkpointing(
            settings,
            run_folder,
            state=self._state,
            base_model=spec.base_model,
            ranks=ranks,
            status=status,
            times_s=self._times_s,
        )
        self._must_end = False
        self._metrics: dict[str, float] | None = None
        """Metrics of the last step; None before the first."""
        self._receipt: Receipt | None = None
        """Of the last step; None before the first of this start."""

    def train(self, checkpoint: Resumed | None = None) -> None:
        """Publishes version 0 or the checkpoint's, then makes version n from batch n until `max_steps` or until the
        orchestrator ends the run. Raises `EndedEarly` after `end_early`."""
        step = self.begin(checkpoint)
        while step < self._settings.max_steps or self._settings.max_steps == -1:
            batches = self.receive(step + 1)
            if batches is None:
                break
            step += 1
            self.update(step, batches)
            self.publish(step)
            self._checkpoints.after_step(step, self._metrics)
        self.finish(step)

    def end_early(self) -> None:
        """Makes `train` end before the next step, with a checkpoint. Must be called on every rank."""
        self._must_end = True

    def close(self) -> None:
        """Closes the batch channel, and the writers when they have written everything, or after some seconds."""
        self._receiver.close()
        self._checkpoints.close()
        self._publishing.close()
        self._traces.close()

    def begin(self, checkpoint: Resumed | None) -> int:
        """Restores the checkpoint, if there is one, publishes the version that training begins with, unless it is
        published already, and returns that version."""
        step = 0
        if checkpoint is not None:
            manifest, parts = checkpoint
            restore(parts, *self._state)
            step, self._metrics = manifest.step, manifest.metrics
            log.info("resumed from the checkpoint of step %d", step)
        self._checkpoints.newest = step
        if self._settings.sleep_mode:
            release_memory(self._policy.device)  # what loading took
        self.publish(step)
        return step

    def receive(self, step: int) -> tuple[MicroBatch, ...] | None:
        """Returns batch `step`, checked; None if the orchestrator has ended the run before it. Raises `EndedEarly`,
        with a checkpoint of the step before, if any rank is to end early. Collective."""
        batches = None
        self._status.set("waiting", step=step, waiting_for=f"orchestrator: batch {step}")
        with timed(self._times_s, "wait_batch"), suppress(EndedEarly):
            batches = self._receiver.receive(step, timeout_s=self._settings.wait_timeout_s, check=self._check)
        if self._ranks.all_reduce_max(int(self._must_end)):
            self._checkpoints.now(step - 1, self._metrics)
            self._publishing.flush()
            raise EndedEarly(f"the trainer was told to end (SIGUSR1); its checkpoint of step {step - 1} is complete")
        if batches is not None:
            check_step(
                batches,
                sequence_len=self._settings.sequence_len,
                pack_tokens=self._settings.pack_tokens,
                vocab_size=self._policy.vocab_size,
                settings=self._settings.loss,
                num_adapters=self._policy.num_adapters,
            )
        return batches

    def update(self, step: int, batches: Sequence[MicroBatch]) -> None:
        """Trains batch `step`, in one optimizer step or several.

        Raises `NonFiniteError` for a step that is not finite: it is not applied.
        """
        self._status.set("training", step=step)
        signal = self._signal(batches)
        rate = learning_rate(step, self._settings) * signal_factor(signal, self._settings.little_signal)
        with timed(self._times_s, "train"), while_exported(self._imported):
            metrics = self._optimizer_steps(step, batches, rate)
        self._traces.write(step, {batch.rank for batch in batches})
        counted = [
            sum(len(batch.token_ids) for batch in batches),
            int(step_flops(self._policy, batches, self._settings.loss)),
            counts_of(batches).loss_tokens,
        ]
        num_tokens, flops, num_loss_tokens = self._ranks.all_reduce_sum(counted)
        self._receipt = Receipt(step=step, num_tokens=num_loss_tokens)
        speed = flops * self._settings.ppo_epochs / self._times_s["time/train_s"]
        self._metrics = metrics | {
            "optim/learning_rate": rate,
            "optim/signal": signal,
            "perf/train_tokens": float(num_tokens),
            "perf/train_tokens_per_s": num_tokens / self._times_s["time/train_s"],
            "perf/train_tflops": speed / 1e12,
        }
        if (peak := peak_flops(self._policy.device)) is not None:
            self._metrics["perf/train_mfu"] = speed / (peak * self._ranks.size)
        if self._settings.sleep_mode:
            release_memory(self._policy.device)  # for the server, which wakes now
        if step % self._settings.logging_steps:
            return
        shown = (
            *("loss/total", "policy/kl", "policy/teacher_kl", "policy/masked", "policy/tokens", "optim/grad_norm"),
            "perf/train_tokens_per_s",
        )
        figures = (f"{key} {self._metrics[key]:.4g}" for key in shown if key in self._metrics)
        log.info("step %d: %s", step, " ".join(figures))

    def publish(self, step: int) -> None:
        """Publishes the policy as version `step`; its files are written beside the next step."""
        self._status.set("publishing", step=step)
        metrics = None if self._metrics is None else self._metrics | self._times_s
        with timed(self._times_s, "publish"):
            self._publishing.publish(version=step, metrics=metrics, receipt=self._receipt)

    def finish(self, step: int) -> None:
        """Returns when everything is published and saved."""
        self._status.set("finishing", step=step, waiting_for=f"versions in {self._run_folder.broadcasts}")
        self._publishing.flush()
        self._checkpoints.finish(step, self._metrics)
        log.info("finished after step %d", step)
        self._status.set("finished", step=step)

    def _check(self) -> None:
        """Raises if waiting is in vain: something could not be written, the orchestrator has failed, the server whose
        base is trained on has ended, or this trainer is to end early."""
        if self._must_end:
            raise EndedEarly("it is told to end")
        self._publishing.check()
        self._checkpoints.check()
        self._orchestrator.check()
        check_exporter(self._imported)

    def _optimizer_steps(self, step: int, batches: Sequence[MicroBatch], rate: float) -> dict[str, float]:
        """Makes an optimizer step for each `gradient_accumulation_steps` micro-batches of this rank, `ppo_epochs` times
        over the batch. Every rank has the same number of micro-batches. Returns the metrics of the last epoch, but the
        mismatch of the first optimizer step, before which the weights are those that servers are proved to serve."""
        size = self._settings.gradient_accumulation_steps or len(batches)
        parts = [batches[start : start + size] for start in range(0, len(batches), size)]
        untouched, states, first = True, list[dict[str, State]](), dict[str, State]()
        for epoch in range(self._settings.ppo_epochs):
            self._objective.trained = (lambda *_: None) if epoch else self._traces.add
            states = []
            for part in parts:
                try:
                    states.append(self._optimizer_step(step, part, rate))
                except NonFiniteError as error:
                    raise self._refused(step, error, untouched=untouched) from error
                if untouched:
                    first = {key: state for key, state in states[0].items() if key.startswith("policy/mismatch_")}
                untouched = False
        return numbers_of(reduced(states) | first)

    def _optimizer_step(self, step: int, batches: Sequence[MicroBatch], rate: float) -> dict[str, State]:
        """Computes forward, loss and backward for each micro-batch, then one step of the optimizer."""
        states = self._objective.accumulate(batches, step=step)
        if not math.isfinite(total := states["loss/total"][1]):
            raise NonFiniteError(f"the loss is {total}")
        norm = self._optimizer.step(learning_rate=rate)
        self._objective.after_step()
        return states | mean_over_steps({"optim/grad_norm": norm})

    def _refused(self, step: int, error: NonFiniteError, *, untouched: bool) -> NonFiniteError:
        """Returns the error of a step that is not finite. Writes a checkpoint of the state before it, if that is
        `untouched`."""
        message = f"step {step} is not finite: {error}; it was not applied, and version {step - 1} is the last good one"
        if (own := self._settings.loss.import_path) is not None:
            message += f"; the loss is that of {own}"
        try:
            if untouched:
                self._checkpoints.now(step - 1, self._metrics)
        except OSError as failure:
            message += f"; the state before it could not be kept: {failure}"
        return NonFiniteError(f"{message}; its batch is {step_folder(self._run_folder.batches, step)}")

    def _signal(self, batches: Sequence[MicroBatch]) -> float:
        """Returns the share of the batch's loss tokens that have anything to teach."""
        own = num_signal_tokens(batches, self._settings.loss), counts_of(batches).loss_tokens
        num_signal, num_tokens = self._ranks.all_reduce_sum(own)
        return num_signal / num_tokens if num_tokens else 1.0
