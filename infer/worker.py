"""Our extension of vLLM's worker, which runs inside its engine process. vLLM finds it by its qualified name."""

import gc
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from infer import cpu, lend, score_temperature


class PolicyWorker:
    """What the engine asks of a worker by `collective_rpc`."""

    def install_ours(self, on_cpu: bool, lora_on_cpu: bool, norms: Sequence[str]) -> dict[str, Any]:
        """Puts our parts in the place of vLLM's, once the model is loaded.

        `norms` are candidates of norm weights that can carry noise, where it is served. Returns `noisy_norms`, the
        sizes of those that can, and whether `score_temperature` is installed.
        """
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        model: Any = self.get_model()  # type: ignore[attr-defined]
        if on_cpu:
            cpu.allow_amx()
            cpu.install_restored_generators(runner)
            cpu.install_ranks()
        if lora_on_cpu:
            cpu.install_grouped_lora(model)
        noisy_norms = self.install_norm_noise(model, norms) if norms else {}
        installed = score_temperature.install(runner)
        gc.freeze()  # what is there stays: the collector never looks at it
        gc.enable()
        return {"noisy_norms": noisy_norms, "score_temperature": installed}

    def install_norm_noise(self, model: Any, norms: Sequence[str]) -> dict[str, int]:
        """Overridden by the worker of a server that was started for noise."""
        raise TypeError("this worker has no noise")

    def export_base_weights(self, output_dir: str, base_folder: str, base_model: str) -> int:
        """Offers the base weights to the trainers of the run in `output_dir`. Returns their bytes."""
        manifest = lend.export_model(
            self.get_model(),  # type: ignore[attr-defined]
            output_dir=output_dir,
            base_folder=Path(base_folder),
            base_model=base_model,
            dtype=self.model_config.dtype,  # type: ignore[attr-defined]
            device=self.device,  # type: ignore[attr-defined]
        )
        return manifest.num_bytes

    def load_policy_weights(self, folder: str | None, base_folder: str) -> None:
        """Replaces the model's weights in place by the tensors in `folder`, or by the base's where it is None.

        Layers of which `folder` has no tensor keep their weights. vLLM merges some layers (q, k and v into one); of
        these it needs all parts, so those that `folder` lacks are taken from the base.
        """
        base = tensor_files(Path(base_folder))
        overlay = base if folder is None else tensor_files(Path(folder))
        packed = getattr(self.get_model(), "packed_modules_mapping", {})  # type: ignore[attr-defined]
        wanted = {name: (overlay if name in overlay else base)[name] for name in with_siblings(overlay, base, packed)}
        # For each layer that keeps its weights vLLM would warn.
        noisy = [logging.getLogger(f"vllm.model_executor.model_loader.reload.{n}") for n in ("layerwise", "inplace")]
        levels = [logger.level for logger in noisy]
        try:
            for logger in noisy:
                logger.setLevel(logging.ERROR)
            self.model_runner.reload_weights(weights_iterator=tensors_in(wanted))  # type: ignore[attr-defined]
        finally:
            for logger, level in zip(noisy, levels, strict=True):
                logger.setLevel(level)
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


def with_siblings(changed: Iterable[str], base: Mapping[str, Path], packed: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the names, and those of the layers that vLLM merges with theirs, as far as the base has them; layer by
    layer. `packed` is vLLM's mapping, as `{"qkv_proj": ["q_proj", "k_proj", "v_proj"]}`."""
    groups = {part: parts for parts in packed.values() for part in parts}
    names: dict[str, None] = {}
    for name in sorted(changed):
        pieces = name.split(".")
        for part in groups.get(pieces[-2], ()) if len(pieces) > 1 else ():
            sibling = ".".join([*pieces[:-2], part, pieces[-1]])
            if sibling in base:
                names[sibling] = None
        names[name] = None
    return list(names)


def tensors_in(files: Mapping[str, Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the named tensors, one in memory at a time."""
    for name, path in files.items():
        with safe_open(path, framework="pt") as file:
            yield name, file.get_tensor(name)
