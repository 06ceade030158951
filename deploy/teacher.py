"""The server of a teacher: whether a run starts one, and its settings."""

import json
from collections.abc import Iterator
from pathlib import Path

from grpo.configs.errors import Problem
from grpo.configs.infer import InferSettings, TeacherServerSettings
from grpo.configs.loading import LoadedSettings
from grpo.configs.orch import OrchSettings
from grpo.configs.train import TrainSettings


def why_not_started(train: TrainSettings, orch: OrchSettings) -> str | None:
    """Why there is no server of a teacher to be started; None where there is."""
    teacher = orch.teacher_model
    if train.loss.teacher_tau == 0:
        return "the trainer's loss.teacher_tau is 0"
    if teacher is None:
        return "the orchestrator's teacher_model is not set"
    if teacher.reference:
        return "the teacher is the model before training (teacher_model.reference)"
    if teacher.client.base_url is not None:
        return f"the teacher is served at {', '.join(teacher.client.base_url)} (teacher_model.client.base_url)"
    return None


def teacher_problems(
    teacher: LoadedSettings[TeacherServerSettings], *, infer: InferSettings, orch: OrchSettings
) -> Iterator[Problem]:
    """Yields problems where the teacher's own settings contradict those of the run that starts its server."""
    longest, needed = teacher.settings.max_model_len, _longest(infer, orch) + 1
    if longest is not None and longest < needed:
        why = f"must be at least {needed}, one more than the longest sample, which the teacher is to read; remove it"
        yield teacher.problem("max_model_len", why)


def server_settings(
    chosen: TeacherServerSettings, *, train: TrainSettings, infer: InferSettings, orch: OrchSettings
) -> InferSettings:
    """Returns the settings of the teacher's grpo-infer: those that were chosen, and for the rest what the run needs.
    From the policy's server comes the device; its other settings are for sampling, or fit its model alone."""
    assert orch.teacher_model is not None
    of_the_run = {
        "model": orch.teacher_model.model.name,
        # A folder that holds no run, so that this server can load none of its versions.
        "output_dir": str(Path(train.output_dir) / "teacher"),
        "enable_lora": False,
        "api_key_var": orch.teacher_model.client.api_key_var,
        "device": infer.device,
        "max_model_len": _longest(infer, orch) + 1,
    }
    return InferSettings.model_validate(of_the_run | chosen.model_dump(exclude_unset=True))


def within_model(settings: InferSettings, folder: Path) -> InferSettings:
    """Returns the settings with no longer sequences than the model in `folder` was made for, where its configuration
    says that plainly; says so on standard output where that makes a difference."""
    config = json.loads((folder / "config.json").read_bytes())
    most, longest = config.get("max_position_embeddings"), settings.max_model_len
    if not isinstance(most, int) or longest is None or longest <= most or config.get("rope_scaling"):
        return settings
    print(
        f"the teacher {settings.model} reads {most - 1} tokens at most; longer samples get no log-probabilities of it, "
        "and are dropped and counted",
        flush=True,
    )
    return settings.model_copy(update={"max_model_len": most})


def _longest(infer: InferSettings, orch: OrchSettings) -> int:
    """The longest sample in tokens."""
    return orch.seq_len if infer.max_model_len is None else min(orch.seq_len, infer.max_model_len)
