"""The server of a teacher: whether a run starts one, and its settings."""

import json
from collections.abc import Iterator
from pathlib import Path

from configs.errors import Problem
from configs.infer import InferSettings, TeacherServerSettings
from configs.loading import Loaded
from configs.orch import OrchSettings
from configs.train import TrainSettings

_LEFT = "colocate would give the policy's server all that the trainer leaves"


def why_not_started(train: TrainSettings, orch: OrchSettings) -> str | None:
    """Why there is no server of a teacher to be started; None where there is."""
    teacher = orch.teacher_model
    if train.loss.teacher_tau == 0:
        return "the trainer's loss.teacher_tau is 0"
    if teacher is None:
        return "the orchestrator's teacher_model is not set"
    if teacher.policy_every is not None:
        return "the teacher is the policy itself (teacher_model.policy_every)"
    if teacher.client.base_url is not None:
        return f"the teacher is served at {', '.join(teacher.client.base_url)} (teacher_model.client.base_url)"
    return None


def teacher_problems(
    teacher: Loaded[TeacherServerSettings],
    *,
    infer: Loaded[InferSettings],
    orch: Loaded[OrchSettings],
    shared_gpu: str | None,
) -> Iterator[Problem]:
    """Where the teacher's own settings contradict those of the run, which starts a server of one. `shared_gpu` is one
    that both servers take."""
    assert orch.settings.teacher_model is not None
    chosen = teacher.settings
    needed = _longest(infer.settings, orch.settings) + 1
    if chosen.max_model_len is not None and chosen.max_model_len < needed:
        message = (
            f"must be at least {needed}, one more than the longest sample, which the teacher is to read; remove it"
        )
        yield teacher.problem("max_model_len", message)
    if shared_gpu is not None:
        yield from _on_one_gpu(teacher, infer, shared_gpu)


def _on_one_gpu(teacher: Loaded[TeacherServerSettings], infer: Loaded[InferSettings], gpu: str) -> Iterator[Problem]:
    """Both servers are on a GPU, of which each takes its share when it starts. Not yet run: needs a GPU."""
    key, mine, other = "gpu_memory_utilization", teacher.settings, infer.settings
    mend = f"give each its share, as in --infer.{key} 0.5 --teacher.{key} 0.3, or a GPU of its own by --teacher_gpus"
    if other.colocate and key not in other.model_fields_set:
        taken = f"the teacher's {key} = {mine.gpu_memory_utilization:g} ({teacher.origin(key)})"
        yield infer.problem(key, f"must be set beside {taken} of the same GPU, where {_LEFT}; {mend}")
    elif (total := mine.gpu_memory_utilization + other.gpu_memory_utilization) > 1 + 1e-9:
        taken = f"infer's {key} = {other.gpu_memory_utilization:g} ({infer.origin(key)})"
        yield teacher.problem(key, f"is {total:g} of GPU {gpu} together with {taken}; {mend}")


def device_of(teacher: Loaded[TeacherServerSettings], infer: Loaded[InferSettings]) -> str:
    """Where the teacher's server computes: what was chosen for it, else as the policy's server."""
    return (teacher if "device" in teacher.settings.model_fields_set else infer).settings.device


def server_settings(
    chosen: TeacherServerSettings, *, train: TrainSettings, infer: InferSettings, orch: OrchSettings
) -> InferSettings:
    """What the teacher's grpo-infer is started with: what was chosen, and for the rest what the run needs. From the
    policy's server comes the device; its other settings are for sampling, or fit its model alone."""
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
    """With no longer sequences than the model in `folder` was made for, where its configuration says that plainly; says
    so on standard output where that makes a difference."""
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
