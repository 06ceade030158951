"""Server and trainer on one device and on one copy of the base weights: what their settings must agree in."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from configs.cross import DTYPES
from configs.errors import Problem
from configs.infer import InferSettings
from configs.loading import Loaded
from configs.train import TrainSettings
from deploy.gpus import VisibleGpus


def joined(
    train: Loaded[TrainSettings], infer: Loaded[InferSettings]
) -> tuple[Loaded[TrainSettings], Loaded[InferSettings]]:
    """Where the two share the base weights: what one of them leaves open, device and type, is what the other has."""
    if not (train.settings.colocate and infer.settings.colocate):
        return train, infer
    device = next((one for one in (train.settings.device, infer.settings.device) if one != "auto"), "auto")
    of_train: dict[str, Any] = {} if "device" in train.settings.model_fields_set else {"device": device}
    of_infer: dict[str, Any] = {} if "device" in infer.settings.model_fields_set else {"device": device}
    if "dtype" not in infer.settings.model_fields_set:
        of_infer["dtype"] = DTYPES[train.settings.recipe]
    return (
        replace(train, settings=train.settings.model_copy(update=of_train)),
        replace(infer, settings=infer.settings.model_copy(update=of_infer)),
    )


def sleep_problems(train: Loaded[TrainSettings], visible: VisibleGpus) -> Iterator[Problem]:
    """Where `sleep_mode` is set and there is no GPU to share."""
    if train.settings.sleep_mode and train.settings.device != "cuda" and not visible.names:
        yield train.problem("sleep_mode", "needs a GPU: vLLM cannot sleep on a CPU, and no GPU is visible; remove it")
