"""Named points between the steps of a delivery, at which a test may end the process.

The points are in the code that they interrupt: `faults.point("folder.renamed")`. Nothing happens there unless a test
has set `on_point`.
"""

from collections.abc import Callable

POINTS = (
    "folder.begun",
    "folder.file_written",
    "folder.manifest_written",
    "folder.marked_stable",
    "folder.synced",
    "folder.renamed",
    "batch.sent",
    "batch.received",
    "batch.acknowledged",
    "batch.quarantined",
    "batch.removed",
    "policy.published",
    "policy.retired",
    "policy.removed",
    "policy.in_use_written",
    "step.applied",
    "checkpoint.written",
    "checkpoint.told",
    "checkpoint.retired",
    "checkpoint.removed",
    "shipment.recorded",
    "shipment.sent",
)

on_point: Callable[[str], None] | None = None


def point(name: str) -> None:
    """Says that the process has come to `name`."""
    if on_point is not None:
        on_point(name)
