"""Our extension of vLLM's worker, which runs inside its engine process. vLLM finds it by its qualified name."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from grpo.infer import cpu, lend, score_temperature
from safetensors import safe_open


class PolicyWorker:
    """The methods that the engine calls on its workers by `collective_rpc`."""

    def install_ours(self, on_cpu: bool, lora: bool, norms: Sequence[str]) -> dict[str, int]:
        """Puts our parts in the place of vLLM's, once the model is loaded. `norms` are candidates of norm weights that
        can carry noise, where it is served. Returns the sizes of those that can."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        model: Any = self.get_model()  # type: ignore[attr-defined]
        if on_cpu:
            cpu.allow_amx()
            cpu.install_restored_generators(runner)
            cpu.install_sampling(runner)
            cpu.install_ranks()
            cpu.install_flat_rotary()
            cpu.install_norms(model)
            if lora:
                cpu.install_grouped_lora(model)
        noisy_norms: dict[str, int] = {}
        if norms:
            noisy_norms = self.install_norm_noise(model, norms)  # type: ignore[attr-defined]
        score_temperature.install(runner)
        gc.freeze()  # what is there stays: the collector never looks at it
        gc.enable()
        return noisy_norms

    def export_base_weights(self, output_dir: str, base_folder: str, base_model: str) -> int:
        """Offers the base weights to the trainers of the run in `output_dir`. Returns their bytes."""
        return lend.export_model(
            self.get_model(),  # type: ignore[attr-defined]
            output_dir=output_dir,
            base_folder=Path(base_folder),
            base_model=base_model,
            dtype=self.model_config.dtype,  # type: ignore[attr-defined]
            device=self.device,  # type: ignore[attr-defined]
        ).num_bytes

    def load_policy_weights(self, folder: str | None, base_folder: str) -> None:
        """Replaces the model's weights in place by the tensors in `folder`, and by the base's where that has none. vLLM
        merges some layers (q, k and v into one), of which it needs all parts."""
        files = tensor_files(Path(base_folder)) | (tensor_files(Path(folder)) if folder else {})
        self.model_runner.reload_weights(weights_iterator=tensors_in(files))  # type: ignore[attr-defined]
        self._refresh_tied_head()

    def _refresh_tied_head(self) -> None:
        """On a CPU the head computes with a packed copy of its weight. Tied to the embedding, it has no tensor of its
        own in a checkpoint, and vLLM leaves the copy as it was."""
        for module in self.get_model().modules():  # type: ignore[attr-defined]
            if type(module).__name__ == "ParallelLMHead" and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)


def tensor_files(folder: Path) -> dict[str, Path]:
    """Returns the name of each tensor in the folder's safetensors files, and its file."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def tensors_in(files: Mapping[str, Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the named tensors, one in memory at a time."""
    for name, path in files.items():
        with safe_open(path, framework="pt") as file:
            yield name, file.get_tensor(name)
