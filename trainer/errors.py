"""What stops the trainer.

TrainerError
├── ModelError      (ValueError)       a base model that cannot be trained as asked
├── BatchError      (ValueError)       a batch that this trainer cannot train
└── NonFiniteError  (ArithmeticError)  a step whose loss or gradient is not finite
"""


class TrainerError(Exception):
    """Root of all errors of this package."""


class ModelError(TrainerError, ValueError):
    """A base model that cannot be trained as asked."""


class BatchError(TrainerError, ValueError):
    """A batch that this trainer cannot train."""


class NonFiniteError(TrainerError, ArithmeticError):
    """A step whose loss or gradient is not finite. It was not applied."""
