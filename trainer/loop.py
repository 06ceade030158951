"""The trainer's loop: receive, update, publish, checkpoint."""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from grpo.configs.train import TrainSettings
from grpo.trainer.batch import check_step, counts_of, num_signal_tokens
from grpo.trainer.checkpoint import Checkpointing, Resumed, restore
from grpo.trainer.colocate import check_exporter, while_exported
from grpo.trainer.distributed import ONE, Ranks
from grpo.trainer.errors import EndedEarly, NonFiniteError
from grpo.trainer.flops import peak_flops, step_flops
from grpo.trainer.loss import PolicyTokens
from grpo.trainer.memory import release_memory
from grpo.trainer.metrics import State, numbers_of, reduced, timed
from grpo.trainer.model import Policy
from grpo.trainer.objective import Objective, mean_over_steps
from grpo.trainer.optim import Optimizer, learning_rate, signal_factor
from grpo.trainer.past import PastVersions
from grpo.trainer.proofs import Found, Proofs, described, without
from grpo.trainer.publishing import Publishing
from grpo.trainer.traces import TrainedTokens
from grpo.trainer.witness import Shares, shares_of, witness_of
from grpo.transport.batches.filesystem import BatchReceiver
from grpo.transport.errors import ProofFailed
from grpo.transport.folders import step_folder, write_atomic
from grpo.transport.receipts import REFUSED, WITNESS_SIZE, Receipt
from grpo.transport.records import MicroBatch, PolicySpec
from grpo.transport.run import RunFolder, recorded_program
from grpo.transport.shared_base import ImportedBase
from grpo.transport.status import PeerWatch, StatusFile
from grpo.transport.weights.store import PolicyPublisher

log = logging.getLogger(__name__)
MAX_SLOPE_GAP = 1e-3
"""Largest difference of `policy/slope` from 1. Both sides are float32; rounding is below 1e-6."""
MAX_LAG = 8
"""Largest lag of a sample, where the orchestrator has not told its own (`max_off_policy_steps`)."""


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
        self._optimizer = Optimizer(settings, policy.named_parameters, ranks, witness=policy.witness.zeros)
        self._objective = Objective(policy, settings.loss, ranks, pack_tokens=settings.pack_tokens)
        self._traces = TrainedTokens(run_folder.path, settings.loss)
        self._publishing = Publishing(settings, policy, publisher, spec=spec, ranks=ranks, imported=imported)
        self._past = PastVersions(policy, ranks, run_folder.broadcasts)
        self._proofs = Proofs(settings, policy, self._past, ranks, run_folder.path, self._publishing.norms)
        self._max_lag: int | None = None
        """As the orchestrator tells, once it has joined."""
        self._is_unexplained = False
        """The mismatch of the last step."""
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
        self._without_gradient: frozenset[str] = frozenset()
        """Parameters that were warned of because they had no gradient."""
        self._is_steep = False
        """Whether it was warned of the loss's slope."""
        self._witness = torch.zeros(2, WITNESS_SIZE, dtype=torch.float64)
        """[2, 64] the newest step's, summed over its optimizer steps."""
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
        """Proves samples of batch `step`, and trains it, in one optimizer step or several.

        Raises `NonFiniteError` for a step that is not finite, and `ProofFailed` for one with samples that were not
        drawn as their records say: it is not applied.
        """
        self._status.set("training", step=step)
        signal = self._signal(batches)
        rate = learning_rate(step, self._settings) * signal_factor(signal, self._settings.little_signal)
        with timed(self._times_s, "train"), while_exported(self._imported):
            with timed(self._times_s, "proofs"):
                found = self._proofs.score(step, batches, self._publishing.noise)
            self._settle(step, found)
            metrics, now = self._optimizer_steps(step, batches, rate, found)
        self._traces.write(step, {batch.rank for batch in batches})
        counted = [
            sum(len(batch.token_ids) for batch in batches),
            int(step_flops(self._policy, batches, self._settings.loss)),
            counts_of(batches).loss_tokens,
        ]
        num_tokens, flops, num_loss_tokens = self._ranks.all_reduce_sum(counted)
        self._warn_of_slope(step, metrics.get("policy/slope", 0.0))
        self._warn_of_unexplained(step, now)
        self._receipt = Receipt(
            step=step,
            num_tokens=num_loss_tokens,
            num_proved_now=now.num_now,
            spots=(*found.spots, *now.spots),
            num_unproved=found.num_unproved,
            steps_since_draw=found.steps_since_draw,
            dropped=tuple(sorted(found.dropped)),
            moved={str(lag): total / num for lag, (total, num) in now.moved.items()},
            unexplained={str(lag): value for lag, value in now.unexplained.items()},
            witness=witness_of(self._witness),
        )
        speed = flops * self._settings.ppo_epochs / self._times_s["time/train_s"]
        self._metrics = (
            metrics
            | proof_metrics(found, now)
            | {
                "optim/learning_rate": rate,
                "optim/signal": signal,
                "perf/train_tokens": float(num_tokens),
                "perf/train_tokens_per_s": num_tokens / self._times_s["time/train_s"],
                "perf/train_tflops": speed / 1e12,
            }
        )
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
        if self._max_lag is None:
            told = recorded_program(self._run_folder.path, "orch").get("settings", {})
            self._max_lag = told.get("max_off_policy_steps")
        self._past.keep(step, num=1 + (MAX_LAG if self._max_lag is None else self._max_lag))
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

    def _optimizer_steps(
        self, step: int, batches: Sequence[MicroBatch], rate: float, found: Found
    ) -> tuple[dict[str, float], Found]:
        """Makes an optimizer step for each `gradient_accumulation_steps` micro-batches of this rank, `ppo_epochs` times
        over the batch. Every rank has the same number of micro-batches. Returns the metrics of the last epoch, but the
        mismatch of the first optimizer step, before which the weights are those that servers are proved to serve; and
        what that one's passes prove. Samples that `found` drops carry no loss, nor do those whose proof fails then.
        """
        size = self._settings.gradient_accumulation_steps or len(batches)
        parts = [batches[start : start + size] for start in range(0, len(batches), size)]
        untouched, states, first, now = True, list[dict[str, State]](), dict[str, State](), Found()
        shares = self._shares(parts, found)
        self._witness.zero_()
        idle: frozenset[str] | None = None
        for epoch in range(self._settings.ppo_epochs):
            states = []
            for index, part in enumerate(parts):
                self._objective.trained = self._watched(traced=epoch == 0, proved=untouched)
                part = without(part, found.dropped)
                try:
                    state = self._accumulated(step, part, shares[index])
                    if untouched:
                        now = self._proofs.seen(step, self._publishing.noise)
                        if self._settle(step, now):
                            found.dropped |= now.dropped
                            self._take_back()
                            shares = self._shares(parts, found)
                            state = self._accumulated(step, without(part, now.dropped), shares[index])
                    states.append(self._optimizer_step(state, rate))
                    now_idle = self._optimizer.without_gradient
                    idle = now_idle if idle is None else idle & now_idle
                except NonFiniteError as error:
                    raise self._refused(step, error, untouched=untouched) from error
                if untouched:
                    first = {key: state for key, state in states[0].items() if key.startswith("policy/mismatch_")}
                untouched = False
        self._warn_of_idle(step, idle or frozenset())
        return numbers_of(reduced(states) | first), now

    def _warn_of_idle(self, step: int, names: frozenset[str]) -> None:
        """Warns once of each parameter that has no gradient while others of its kind do."""
        new = sorted(names - self._without_gradient)
        self._without_gradient |= names
        if new and self._ranks.is_main:
            log.warning(
                "the gradient of %d trained matrices was exactly zero in step %d, and that of their siblings was not: "
                "%s; they are not in the model's computation, or frozen",
                len(new),
                step,
                ", ".join(new[:4]) + (", …" if len(new) > 4 else ""),
            )

    def _warn_of_slope(self, step: int, slope: float) -> None:
        """Warns once where the policy loss's gradient is not what its coefficients say; 0 where there was none."""
        if slope and not abs(slope - 1) <= MAX_SLOPE_GAP and not self._is_steep and self._ranks.is_main:
            self._is_steep = True
            log.warning(
                "step %d: the policy loss's gradient by the tokens' log-probabilities is %.4g times what weights, "
                "ratios and advantages say, expected once (policy/slope); its sign or its scale is wrong",
                step,
                slope,
            )

    def _shares(self, parts: Sequence[Sequence[MicroBatch]], found: Found) -> list[Shares]:
        """Returns the shares of the batch's optimizer steps in its witness, without what `found` drops. Collective."""
        kept = [without(part, found.dropped) for part in parts]
        return shares_of(kept, self._settings.loss, self._ranks, epochs=self._settings.ppo_epochs)

    def _watched(self, *, traced: bool, proved: bool) -> Callable[[MicroBatch, PolicyTokens], None]:
        """Returns what is called with the samples of each pass and their loss tokens."""

        def watch(batch: MicroBatch, tokens: PolicyTokens) -> None:
            if traced:
                self._traces.add(batch, tokens)
            if proved:
                self._proofs.see(batch, tokens)

        return watch

    def _accumulated(self, step: int, batches: Sequence[MicroBatch], shares: Shares) -> dict[str, State]:
        """Computes forward, loss and backward for each micro-batch."""
        states = self._objective.accumulate(batches, step=step, shares=shares)
        if not math.isfinite(total := states["loss/total"][1]):
            raise NonFiniteError(f"the loss is {total}")
        return states

    def _take_back(self) -> None:
        """Forgets the passes since the last optimizer step, which was the first of its batch."""
        self._traces.forget()
        self._objective.trained = self._watched(traced=True, proved=False)
        self._optimizer.clear()

    def _optimizer_step(self, states: dict[str, State], rate: float) -> dict[str, State]:
        """Makes one step of the optimizer."""
        norm = self._optimizer.step(learning_rate=rate)
        if self._optimizer.witnessed is not None:
            self._witness += self._optimizer.witnessed
        self._objective.after_step()
        return states | mean_over_steps({"optim/grad_norm": norm})

    # --- proofs ---

    def _settle(self, step: int, found: Found) -> bool:
        """Does what `proofs.on_failure` says where proofs fail. Returns whether samples are to be dropped. Raises
        `ProofFailed`, with a checkpoint of the state before the step. Collective."""
        action, failed = self._settings.proofs.on_failure, found.failed
        if not failed:
            return False
        message = f"step {step}: {described(failed[0])}"
        if len(failed) > 1:
            message += f"; so are {len(failed) - 1} more of its proofs"
        batch = step_folder(self._run_folder.batches, step)
        if action == "stop":
            message += (
                f". The step was not applied, and its batch is {batch}. See whether that server answers from the "
                "version that it is asked for, and start it again; the same command tries this batch again, and with "
                "--proofs.on_failure drop goes on without such samples"
            )
            try:
                if self._ranks.is_main:
                    refused = step_folder(self._run_folder.path / REFUSED, step).with_suffix(".json")
                    refused.parent.mkdir(exist_ok=True)
                    write_atomic(refused, Receipt(step=step, num_tokens=0, spots=tuple(failed)).to_json())
                self._checkpoints.now(step - 1, self._metrics)
            except OSError as failure:
                message += f"; the state before it could not be kept: {failure}"
            raise ProofFailed(message)
        if action == "drop":
            found.dropped |= {one.rollout for one in failed}
        if self._ranks.is_main:
            log.warning("%s (proofs.on_failure: %s)", message, action)
        return bool(found.dropped)

    def _warn_of_unexplained(self, step: int, now: Found) -> None:
        """Warns of mismatches that are far larger than the policy has moved, when the step before had none."""
        before, self._is_unexplained = self._is_unexplained, bool(now.unexplained)
        if now.unexplained and not before and self._ranks.is_main:
            lag, value = max(now.unexplained.items(), key=lambda item: item[1])
            log.warning(
                "step %d: policy/mismatch_kl_lag%d is %.3g nats, far more than the policy has moved meanwhile "
                "(policy/moved_kl_lag%d): servers sampled something else than the versions that they name; see "
                "proofs/failed, and `grpo docs proofs`",
                step,
                lag,
                value,
                lag,
            )

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


def proof_metrics(found: Found, now: Found) -> dict[str, float]:
    """Returns the metrics of a step's proofs, by samples that were scored again and by its own passes."""
    both = found.metrics() | {key: value for key, value in now.metrics().items() if key.startswith("policy/moved_")}
    failed = float(len(found.failed) + len(now.failed))
    return both | {"proofs/tokens_now": float(now.num_now), "proofs/failed": failed}
