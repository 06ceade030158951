"""Writes what the trainer knows of each trained token, with which the orchestrator completes the run's traces.

Legend: `K` loss tokens of a micro-batch.
"""

import logging
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from grpo.configs.loss import LossSettings
from grpo.trainer.loss import PolicyTokens, token_masks
from grpo.transport.folders import remove_leftovers
from grpo.transport.records import MicroBatch
from grpo.transport.traces import (
    FOLDER,
    MASKS,
    TRAINED_SCHEMA,
    VOCABULARY_FILE,
    make_table,
    token_key,
    trained_path,
    write_table,
)
from numpy.typing import NDArray

log = logging.getLogger(__name__)
MAX_WAITING = 4
"""Steps that may wait to be written beside the one at work. The first takes longest, because of imports."""


class TrainedTokens:
    """One rank's part of the traces, a file for each rank that the orchestrator has split the step over. A thread
    writes them beside the next step; parts are missing if the disk refuses, or is slower than the trainer."""

    def __init__(self, run: Path, settings: LossSettings) -> None:
        self._run, self._settings = run, settings
        self._step: list[tuple[MicroBatch, torch.Tensor]] = []
        self._writer = ThreadPoolExecutor(1, "traces")
        remove_leftovers(trained_path(run, 0, 0).parent)
        self._writing = deque[Future[None]]()

    def add(self, batch: MicroBatch, tokens: PolicyTokens) -> None:
        """Adds the loss tokens of a micro-batch, if the run keeps traces in its folder. The values stay on the
        device."""
        if not (self._run / FOLDER / VOCABULARY_FILE).exists():
            return
        logprobs = tokens.logprobs.detach()
        masked = torch.zeros_like(logprobs)
        if self._settings.import_path is None:
            log_ratio = logprobs - tokens.inference_logprobs
            for reason, chosen in token_masks(log_ratio, tokens.sample_ids, tokens.num_samples, self._settings).items():
                masked = torch.where(chosen, float(MASKS.index(reason)), masked)
        self._step.append((batch, torch.stack((logprobs, tokens.entropies.detach(), masked))))

    def forget(self) -> None:
        """Takes back what was added since the last call of `write`."""
        self._step = []

    def write(self, step: int, ranks: Collection[int]) -> None:
        """Writes what was added since the last call, as the parts of `step` of these ranks of the batch."""
        parts, self._step = self._step, []
        if not parts:
            return
        while self._writing and self._writing[0].done():
            self._writing.popleft().result()
        if len(self._writing) > MAX_WAITING:
            log.warning("the trainer's part of the traces of step %d is missing: the disk is slower than the run", step)
        else:
            values = torch.cat([part for _, part in parts], dim=1).cpu().numpy()
            self._writing.append(self._writer.submit(self._write, step, ranks, [batch for batch, _ in parts], values))

    def close(self) -> None:
        """Returns when all is written."""
        self._writer.shutdown()

    def _write(
        self, step: int, ranks: Collection[int], batches: list[MicroBatch], values: NDArray[np.floating[Any]]
    ) -> None:
        rows, begin = {rank: list[dict[str, Any]]() for rank in ranks}, 0
        for batch in batches:
            num = int(np.count_nonzero(batch.loss_mask))
            rows[batch.rank] += _rows(batch, *values[:, begin : begin + num])
            begin += num
        try:
            for rank, of_rank in rows.items():
                write_table(make_table(of_rank, TRAINED_SCHEMA), trained_path(self._run, step, rank))
        except (OSError, pa.ArrowException) as error:
            log.warning("the trainer's part of the traces of step %d is missing: %s", step, error)


def _rows(
    batch: MicroBatch,
    logprobs: NDArray[np.floating[Any]],
    entropies: NDArray[np.floating[Any]],
    masked: NDArray[np.floating[Any]],
) -> list[dict[str, Any]]:
    """Returns one row for each sample of a micro-batch that has loss tokens."""
    starts = batch.starts
    bounds = np.concatenate(([0], np.cumsum(np.add.reduceat(batch.loss_mask.astype(np.int64), starts))))
    return [
        {
            "rollout": batch.rollout_ids[sample],
            "key": token_key(batch.token_ids[start : start + batch.sequence_lengths[sample]]),
            "trainer_logprobs": logprobs[bounds[sample] : bounds[sample + 1]],
            "entropy": entropies[bounds[sample] : bounds[sample + 1]],
            "masked": masked[bounds[sample] : bounds[sample + 1]].astype(np.int8),
        }
        for sample, start in enumerate(starts)
        if bounds[sample] < bounds[sample + 1]
    ]
