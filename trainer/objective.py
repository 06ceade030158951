"""One step's objective over its micro-batches: policy + alpha_sdpo · sdpo + beta_replay · dpo.

Leaves the gradients in the parameters; knows nothing of optimizers, versions or transports.
"""

import math
from collections.abc import Mapping, Sequence

import torch

from configs.loss import LossSettings
from trainer.batch import tokens_by_adapter
from trainer.ema import MovingAverage
from trainer.metrics import Metric, numbers_of, reduced, states_of
from trainer.model import Policy
from trainer.parallel import Ranks
from trainer.streams import HintStream, PairStream, Pass, PolicyStream, Stream
from transport.records import MicroBatch


class Objective:
    """The streams whose weight is not 0: the others cost nothing."""

    def __init__(self, policy: Policy, settings: LossSettings, ranks: Ranks, *, sequence_len: int) -> None:
        self._policy, self._ranks, self._parameters = policy, ranks, policy.parameters
        self._settings = settings
        self.average = _average(policy, settings, ranks)
        """Of the trained weights, for the self-distillation's teacher; None where it is the current policy."""
        self._streams = _streams(policy, settings, sequence_len, self.average)

    def accumulate(self, batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Leaves the gradients of one step's micro-batches in the parameters' `grad`, which must be clear before.

        Returns metrics of all ranks: `loss/total` is what was differentiated, and where several streams are on, each
        one's gradient norm before clipping is told with its share of their sum. All ranks must call it, each with its
        own micro-batches. An adapter for which none of them has tokens is left without gradients.
        """
        plan = [(stream, stream.passes(batches)) for stream in self._streams]
        counts = [self._ranks.most(len(passes)) for _, passes in plan]
        sums, norms = _GradientSums(self._parameters), {stream.name: 0.0 for stream in self._streams}
        parts: list[dict[str, Metric]] = []
        for (stream, passes), count in zip(plan, counts, strict=True):
            parts += self._backward(stream, passes, count)
            if count and len(self._streams) > 1:
                norms[stream.name] = gradient_norm(self._parameters, self._ranks)
            sums.take()
        sums.put_back()
        of_adapters = self._leave_out(batches) if self._policy.adapters else {}
        metrics = numbers_of(self._ranks.merged(reduced(states_of(parts))))
        total = sum(stream.weight * metrics.get(f"loss/{stream.name}", 0.0) for stream in self._streams)
        return metrics | of_adapters | _shares(norms) | {"loss/total": total}

    def clear(self) -> None:
        """Takes away what `accumulate` has left."""
        for parameter in self._parameters:
            parameter.grad = None

    def is_finite(self, batches: Sequence[MicroBatch]) -> bool:
        """Whether the loss of these micro-batches and its gradient are finite. Leaves no gradients. Collective."""
        self.clear()
        loss, norm = self.accumulate(batches)["loss/total"], gradient_norm(self._parameters, self._ranks)
        self.clear()
        return math.isfinite(loss) and math.isfinite(norm)

    def _leave_out(self, batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Leaves the adapters that no rank has tokens for out of the step. The tokens of each, as metrics."""
        names = self._policy.adapters
        counts = tokens_by_adapter(batches, num_adapters=len(names), settings=self._settings)
        totals = [self._ranks.total(count) for count in counts]
        self._policy.leave_out(adapter for adapter, total in enumerate(totals) if not total)
        return {f"policy/adapter_tokens_{name}": float(total) for name, total in zip(names, totals, strict=True)}

    def stepped(self) -> None:
        """To be called after each optimizer step: moves the average of the weights on."""
        if self.average is not None:
            self.average.update()

    def _backward(self, stream: Stream, passes: Sequence[Pass], count: int) -> list[dict[str, Metric]]:
        """`count` passes, of which this rank's own come first."""
        metrics = []
        for index in range(count):
            self._policy.begin_pass(last=index == count - 1)
            if index < len(passes):
                loss, measured = passes[index]()
                (stream.weight * loss).backward()
                metrics.append(measured)
            else:
                stream.idle().backward()
        return metrics


def gradient_norm(parameters: Sequence[torch.nn.Parameter], ranks: Ranks) -> float:
    """Euclidean norm of the gradients of all parameters, over all ranks where they are sharded. All ranks must call
    it."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return float(ranks.whole(torch.nn.utils.get_total_norm(gradients)))


class _GradientSums:
    """Takes one stream's gradients after the other out of the parameters and adds them up. Those of the first stream
    that has any are not copied."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._sums: list[torch.Tensor | None] = [None] * len(parameters)

    def take(self) -> None:
        """Leaves the parameters without gradients."""
        for place, parameter in enumerate(self._parameters):
            gradient, parameter.grad = parameter.grad, None
            earlier = self._sums[place]
            if gradient is not None:
                self._sums[place] = gradient if earlier is None else earlier.add_(gradient)

    def put_back(self) -> None:
        """Leaves the sums in the parameters."""
        for parameter, gradient in zip(self._parameters, self._sums, strict=True):
            parameter.grad = gradient


def _average(policy: Policy, settings: LossSettings, ranks: Ranks) -> MovingAverage | None:
    if not settings.alpha_sdpo or settings.sdpo.teacher == "current":
        return None
    return MovingAverage(policy.named_parameters, decay=settings.sdpo.ema_decay, ranks=ranks)


def _streams(policy: Policy, settings: LossSettings, sequence_len: int, average: MovingAverage | None) -> list[Stream]:
    streams: list[Stream] = []
    if settings.trains_policy:
        streams.append(PolicyStream(policy, settings))
    if weight := settings.alpha_sdpo:
        streams.append(HintStream(policy, settings.sdpo, weight=weight, sequence_len=sequence_len, average=average))
    if weight := settings.beta_replay:
        streams.append(PairStream(policy, settings.dpo, weight=weight, sequence_len=sequence_len))
    return streams


def _shares(norms: Mapping[str, float]) -> dict[str, float]:
    """Norms and their shares by stream; nothing where only one stream is on."""
    if len(norms) < 2:
        return {}
    total = sum(norms.values())
    metrics = {f"optim/grad_norm_{name}": norm for name, norm in norms.items()}
    return metrics | {f"optim/grad_share_{name}": norm / total if total else 0.0 for name, norm in norms.items()}
