"""What a step of the trainer needs of a device's memory, estimated by the formula of docs/memory.md."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.train import TrainSettings

if TYPE_CHECKING:
    import torch

    from trainer.memory import Checkpointing

FIXED_BYTES = 2560 * 2**20
"""CUDA context, cuDNN workspace and fragments of the trainer's process, for the estimate."""
LOGITS_AT_ONCE = 2**25
OPTIMIZER_BYTES = {"adamw": 8, "adamw_8bit": 2, "adamw_8bit_paged": 2, "muon": 4}
"""Of state per trained parameter, for the estimate."""


def estimate(
    settings: TrainSettings, config: Any, *, num_trained: int, checkpointing: "Checkpointing | None" = None
) -> int:
    """The trainer's need in bytes without the base, from its settings, transformers' `config` of the decoder and the
    number of trained parameters; docs/memory.md has the formula. `checkpointing`: None as the settings say."""
    num_tokens, element = settings.sequence_len, 2 if settings.recipe == "bf16" else 4
    hidden, layers = config.hidden_size, config.num_hidden_layers
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    layer = 6 * num_tokens * (hidden + inner) * element
    chosen = checkpointing or ("full" if settings.gradient_checkpointing else "none")
    inputs = layers * num_tokens * hidden * element
    kept = {"none": layers * layer, "selective": 2 * inputs + layer, "full": inputs + layer}[chosen]
    logits = min(LOGITS_AT_ONCE, num_tokens * config.vocab_size) * (4 + element) + 3 * num_tokens * hidden * element
    dequantized = 3 * hidden * inner * element if settings.quantization else 0
    lora = num_trained * (8 + OPTIMIZER_BYTES[settings.optimizer])
    return int(lora + kept + logits + dequantized + FIXED_BYTES)


def checkpointing_for(
    settings: TrainSettings, folder: Path, device: "torch.device", *, imports: bool
) -> "Checkpointing":
    """What layers keep for the backward pass: as the settings say, or on a GPU as much as its free memory holds beside
    the base, of which nothing is this process's own where it `imports` it. Not yet run on a GPU."""
    if settings.gradient_checkpointing is not None or device.type != "cuda":
        return "full" if settings.gradient_checkpointing else "none"
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    base = 0 if imports else stored // (3 if settings.quantization else 1)
    widest = max(config.hidden_size, getattr(config, "intermediate_size", None) or 0)
    adapter = 2 * settings.lora_rank * widest * len(settings.lora_target_modules) * config.num_hidden_layers
    num_trained = adapter if settings.lora else stored // 2
    left = 0.9 * torch.cuda.mem_get_info(device)[0] - base
    kinds: tuple[Checkpointing, ...] = ("none", "selective")
    fitting = (k for k in kinds if estimate(settings, config, num_trained=num_trained, checkpointing=k) < left)
    return next(fitting, "full")
