"""Which tensors a server exports, by which names, in stand-ins for vLLM's layers; exporting itself is transport's."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from grpo.infer.lend import by_checkpoint, export_model, rows_of_parameters
from grpo.transport.errors import SharedBaseError
from grpo.transport.shared_base import import_base
from safetensors.torch import save_file

CPU = torch.device("cpu")
H, Q, KV, V = 4, 6, 2, 5
PARTS = {
    "model.embed_tokens.weight": (V, H),
    "model.q_proj.weight": (Q, H),
    "model.q_proj.bias": (Q,),
    "model.k_proj.weight": (KV, H),
    "model.k_proj.bias": (KV,),
    "model.v_proj.weight": (KV, H),
    "model.v_proj.bias": (KV,),
    "model.o_proj.weight": (H, Q),
    "model.norm.weight": (H,),
}
"""The checkpoint."""


class Fused(torch.nn.Linear):
    output_partition_sizes = (Q, KV, KV)


class Wrapped(torch.nn.Module):
    """vLLM's LoRA layer around another."""

    def __init__(self, base_layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_a_stacked = (torch.zeros(3, 1, 8, 4),)


class Embedding(torch.nn.Embedding):
    """With rows up to a multiple of 8."""

    org_vocab_size = V

    def __init__(self) -> None:
        super().__init__(8, H)


class Renaming:
    """A mapper that names parts by what they are fused into, as newer versions do."""

    def apply_list(self, names: Sequence[str]) -> list[str]:
        for part in "qkv":
            names = [name.replace(f".{part}_proj", ".qkv_proj") for name in names]
        return list(names)


class Served(torch.nn.Module):
    """`model.{embed_tokens, qkv_proj, o_proj, norm}`"""

    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    config: Any = type("Config", (), {"tie_word_embeddings": True})
    hf_to_vllm_mapper: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.embed_tokens = Embedding()
        self.model.qkv_proj = Wrapped(Fused(H, Q + 2 * KV))
        self.model.o_proj = Wrapped(torch.nn.Linear(Q, H, bias=False))
        self.model.norm = torch.nn.RMSNorm(H)
        self.requires_grad_(False)

    @property
    def fused(self) -> Any:
        return self.model.qkv_proj.base_layer  # type: ignore[union-attr]


def checkpoint_in(folder: Path, model: Served) -> Path:
    """The checkpoint that the model was loaded from, with the head's tensor, which is the embedding's."""
    fused, bias = model.fused.weight.split((Q, KV, KV)), model.fused.bias.split((Q, KV, KV))
    tensors = {f"model.{part}_proj.weight": rows.clone() for part, rows in zip("qkv", fused, strict=True)}
    tensors |= {f"model.{part}_proj.bias": rows.clone() for part, rows in zip("qkv", bias, strict=True)}
    tensors["model.o_proj.weight"] = model.model.o_proj.base_layer.weight.clone()  # type: ignore
    tensors["model.norm.weight"] = model.model.norm.weight.clone()  # type: ignore
    tensors["model.embed_tokens.weight"] = model.model.embed_tokens.weight[:V].clone()  # type: ignore
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({}))
    return folder


@pytest.mark.parametrize("mapper", [None, Renaming()])
def test_an_importer_has_the_checkpoints_tensors_and_the_model_computes_with_the_same(
    tmp_path: Path, mapper: Renaming | None
) -> None:
    model = Served()
    model.hf_to_vllm_mapper = mapper
    checkpoint = checkpoint_in(tmp_path, model)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    manifest = export_model(
        model, output_dir=str(tmp_path), base_folder=checkpoint, base_model="m", dtype=torch.float32, device=CPU
    )
    assert manifest.left.keys() == {"lm_head.weight"}
    assert manifest.num_bytes == 4 * sum(torch.Size(shape).numel() for shape in PARTS.values())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
    imported = import_base(tmp_path, CPU, timeout_s=60).tensors
    assert {name: tuple(tensor.shape) for name, tensor in imported.items()} == PARTS
    assert torch.equal(imported["model.k_proj.weight"], before["model.qkv_proj.base_layer.weight"][Q : Q + KV])
    assert torch.equal(imported["model.v_proj.bias"], before["model.qkv_proj.base_layer.bias"][-KV:])
    model.fused.weight.data[Q] += 1.0  # had vLLM kept weights of its own, the trainer would not see it
    assert torch.equal(imported["model.k_proj.weight"][0], before["model.qkv_proj.base_layer.weight"][Q] + 1.0)


def held(model: Served) -> dict[str, torch.Tensor]:
    return dict(rows_of_parameters(model))


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda model: model.model.o_proj.base_layer.weight.t_(), "model.o_proj.weight"),
        (lambda model: delattr(model.model, "norm"), "model.norm.weight"),
        (lambda model: model.model.register_parameter("scale", torch.nn.Parameter(torch.ones(1))), "model.scale"),
        (lambda model: setattr(model.fused, "output_partition_sizes", (Q, KV)), "qkv_proj.base_layer.weight"),
    ],
)
def test_a_model_that_holds_other_tensors_than_the_checkpoint_exports_nothing(
    spoil: Callable[[Served], object], name: str
) -> None:
    model = Served()
    spoil(model)
    with pytest.raises(SharedBaseError, match=name):
        by_checkpoint(model, held(model), PARTS)


def test_what_is_computed_is_left_and_an_untied_head_is_not() -> None:
    model = Served()
    _, left = by_checkpoint(model, held(model), PARTS | {"model.rotary_emb.inv_freq": (1,), "lm_head.weight": (V, H)})
    assert left.keys() == {"model.rotary_emb.inv_freq", "lm_head.weight"}
    model.config = type("Config", (), {"tie_word_embeddings": False})
    with pytest.raises(SharedBaseError, match=r"lm_head\.weight"):
        by_checkpoint(model, held(model), PARTS | {"lm_head.weight": (V, H)})
