"""Leaves what the trainer knows of each trained token for the run's traces, which the orchestrator completes with it.

Legend: `K` loss tokens of a micro-batch.
"""

import logging
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from configs.loss import LossSettings
from trainer.loss import token_masks
from transport.records import MicroBatch
from transport.traces import (
    FOLDER,
    MASKS,
    TRAINED_SCHEMA,
    VOCABULARY_FILE,
    make_table,
    token_key,
    trained_path,
    write_table,
)

log = logging.getLogger(__name__)
_MASKS = {"importance"} | {f"{of}_mask_{end}" for of in ("token", "geo", "sequence") for end in ("low", "high")}


class TrainedTokens:
    """One rank's part of the traces, a file for each rank that the orchestrator has split the step over. A thread
    writes them beside the next step; where the disk refuses, or is slower than the trainer, parts are missing."""

    def __init__(self, run: Path, settings: LossSettings) -> None:
        self._run, self._settings = run, settings
        self._step: list[tuple[MicroBatch, torch.Tensor, torch.Tensor]] = []
        self._writer = ThreadPoolExecutor(1, "traces")
        self._writing: Future[None] | None = None

    def add(self, batch: MicroBatch, logprobs: torch.Tensor, entropies: torch.Tensor) -> None:
        """The trainer's log-probabilities and entropies [K] of a micro-batch; they stay on the device."""
        self._step.append((batch, logprobs.detach(), entropies.detach()))

    def write(self, step: int) -> None:
        """Leaves what was added since the last call, if the run keeps traces here."""
        parts, self._step = self._step, []
        if not parts or not (self._run / FOLDER / VOCABULARY_FILE).exists():
            return
        if self._writing is not None and not self._writing.done():
            log.warning("the trainer's part of the traces of step %d is missing: the one before is being written", step)
        else:
            if self._writing is not None:
                self._writing.result()
            both = torch.cat([torch.stack((logprobs, entropies)) for _, logprobs, entropies in parts], dim=1).cpu()
            self._writing = self._writer.submit(self._write, step, [batch for batch, _, _ in parts], both)

    def close(self) -> None:
        """Returns when all is written."""
        self._writer.shutdown()

    def _write(self, step: int, batches: list[MicroBatch], both: torch.Tensor) -> None:
        rows, begin = defaultdict[int, list[dict[str, Any]]](list), 0
        for batch in batches:
            num = int(np.count_nonzero(batch.loss_mask))
            rows[batch.rank] += self._rows(batch, *both[:, begin : begin + num])
            begin += num
        try:
            for rank, of_rank in rows.items():
                write_table(make_table(of_rank, TRAINED_SCHEMA), trained_path(self._run, step, rank))
        except (OSError, pa.ArrowException) as error:
            log.warning("the trainer's part of the traces of step %d is missing: %s", step, error)

    def _rows(self, batch: MicroBatch, logprobs: torch.Tensor, entropies: torch.Tensor) -> list[dict[str, Any]]:
        """One for each sample of a micro-batch that has loss tokens."""
        targets, lengths = np.flatnonzero(batch.loss_mask), batch.sequence_lengths
        sample_ids = np.repeat(np.arange(len(lengths)), lengths)[targets]
        masks = token_masks(
            logprobs - torch.from_numpy(batch.inference_logprobs[targets]),
            torch.from_numpy(sample_ids),
            len(lengths),
            **self._settings.model_dump(include=_MASKS),
        )
        masked = np.zeros(len(targets), np.int8)
        for reason, tokens in masks.items():
            masked[tokens.numpy()] = MASKS.index(reason)
        values = {"trainer_logprobs": logprobs.numpy(), "entropy": entropies.numpy(), "masked": masked}
        bounds = np.searchsorted(sample_ids, np.arange(len(lengths) + 1))
        starts = np.concatenate(([0], np.cumsum(lengths)))
        return [
            {
                "rollout": batch.rollout_ids[sample],
                "key": token_key(batch.token_ids[starts[sample] : starts[sample + 1]]),
                **{name: value[bounds[sample] : bounds[sample + 1]] for name, value in values.items()},
            }
            for sample in range(len(lengths))
            if bounds[sample] < bounds[sample + 1]
        ]
