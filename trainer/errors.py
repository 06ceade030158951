"""Errors that stop the trainer.

TrainerError
├── ModelError      (ValueError)       a base model that cannot be trained as asked
├── BatchError      (ValueError)       a batch that this trainer cannot train
├── LossError       (ValueError)       a user's own loss that cannot be used
├── NonFiniteError  (ArithmeticError)  a step whose loss or gradient is not finite
├── ResumeError     (ValueError)       a run that cannot be resumed as asked
├── EndedEarly      (RuntimeError)     the trainer was told to end, with a checkpoint
├── OutOfMemory     (RuntimeError)     a step does not fit into the device's memory; the next start keeps less
├── RankFailed      (RuntimeError)     another rank of this trainer has failed, or did not answer in time
└── ExporterGone    (RuntimeError)     the server whose base weights the trainer computes on has ended
"""


class TrainerError(Exception):
    """Root of all errors of this package."""


class ModelError(TrainerError, ValueError):
    """A base model that cannot be trained as asked."""


class BatchError(TrainerError, ValueError):
    """A batch that this trainer cannot train."""


class LossError(TrainerError, ValueError):
    """A user's own loss that cannot be used."""


class NonFiniteError(TrainerError, ArithmeticError):
    """A step whose loss or gradient is not finite. It was not applied."""


class ResumeError(TrainerError, ValueError):
    """A run that cannot be resumed as asked."""


class EndedEarly(TrainerError, RuntimeError):
    """The trainer was told by SIGUSR1 to end. It has written a checkpoint; started again by the same command, it
    resumes from that."""


class OutOfMemory(TrainerError, RuntimeError):
    """A step does not fit into the device's memory. Started again, the trainer keeps fewer activations."""


class RankFailed(TrainerError, RuntimeError):
    """Another rank of this trainer has failed, or did not answer in time."""


class ExporterGone(TrainerError, RuntimeError):
    """The server whose base weights the trainer computes on has ended. Started again, the trainer resumes from its
    checkpoint, on the weights of the next server."""
