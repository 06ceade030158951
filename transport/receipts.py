"""What the trainer says of a step, for those who check it: the witness of its gradients, and the spot proofs of its
samples.

A receipt is the file `receipt.json` in the folder of the version that the step gave. The ledger keeps it beside the
witness that the orchestrator had computed from the batch's samples.
"""

from typing import Annotated

import msgspec
from grpo.transport.records import Natural, Record

RECEIPT_FILE = "receipt.json"
REFUSED = "refused"
"""The folder in the run's with the receipts of steps that were not applied because a proof had failed,
`step_000012.json` and so on."""
WITNESS_SIZE = 64
"""Components of a witness."""

NOT_FINITE = 1e30
"""Stands for what is no finite number, which JSON does not hold."""

Components = Annotated[tuple[float, ...], msgspec.Meta(min_length=WITNESS_SIZE, max_length=WITNESS_SIZE)]


class Witness(Record, frozen=True, kw_only=True):
    """Sums over a batch's loss tokens of each one's weight times the signs of its sample (`transport/witness.py`).
    Tokens that a mask drops count too. Of a batch with several optimizer steps it is the mean over them, each by its
    share of the batch."""

    presence: Components
    """Each token counts with its weight in the loss."""
    content: Components
    """Each token counts with its weight, its advantage, and a pseudo-random number of its id, its place, the id before
    it and its adapter."""


class ExpectedWitness(Witness, frozen=True, kw_only=True):
    """The witness that the orchestrator computes from a batch's samples, before they are packed."""

    presence_size: float
    """Sum of the tokens' weights: rounding is a share of it."""
    content_size: float
    """Sum of |weight · advantage|."""


class KeptWitness(Record, frozen=True, kw_only=True):
    """The part of a step's witness that a ledger keeps, once the whole one was what it must be."""

    components: bytes
    """64 bytes: the first 8 components of presence, then those of content, as the gradients had them, in float32
    (little-endian)."""
    presence_size: float
    content_size: float
    """Those of the witness that was expected."""
    gap: float
    """Largest difference between all components and those that were expected, as a share of its size."""


class SpotProof(Record, frozen=True, kw_only=True):
    """A sample's tokens of one version, scored again by the trainer under just that version."""

    rollout: str
    server: str
    """The server that sampled them."""
    adapter: Natural = 0
    """Index of the adapter."""
    version: Natural
    num_tokens: Natural
    max_abs: float
    """Largest difference between the trainer's and the server's log-probabilities, in nats."""
    mean_abs: float
    tolerance: float
    """The difference that was allowed, of the kind that `measure` names."""
    measure: str
    """`max_abs` or `mean_abs`."""
    failed_at: Natural | None = None
    """Place in the sample of the first token that differs by more; None where the proof holds."""
    trained_logprob: float | None = None
    """The trainer's log-probability of that token."""
    served_logprob: float | None = None
    """The server's."""


class Receipt(Record, frozen=True, kw_only=True):
    """What the trainer says of a step."""

    step: Natural
    num_tokens: Natural
    """Loss tokens that it trained, of all ranks."""
    num_proved_now: Natural = 0
    """Of these, tokens that the step's own weights had sampled: its own pass proves each of them."""
    witness: Witness | None = None
    """As accumulated in the gradients."""
    spots: tuple[SpotProof, ...] = ()
    """Samples that were scored again; those that failed at the step's own weights among them."""
    num_unproved: Natural = 0
    """Samples that were drawn for a proof, and whose version the trainer does not have any more."""
    steps_since_draw: Natural = 0
    """Steps with samples of earlier versions since samples were last drawn, where none was drawn in this one: of small
    batches they are drawn more rarely, and as many more."""
    dropped: tuple[str, ...] = ()
    """Rollouts whose samples carried no loss, because a spot proof did not hold (`proofs.on_failure: drop`)."""
    unexplained: dict[str, float] = msgspec.field(default_factory=dict)
    """By lag, the mean k3 estimate in nats between server and trainer over the batch, where it lies far outside of what
    the policy has moved."""
    moved: dict[str, float] = msgspec.field(default_factory=dict)
    """By lag, the mean k3 estimate in nats of KL(current ‖ sampled version) on the proved tokens, by the trainer's own
    numbers: how far the policy has moved."""
