"""Names, shapes and bytes of a base's weights from its config.json, against the models themselves."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.memory_estimates import CONFIGS
from deploy.memory.shapes import ModelShape, Quantization, ShapeError
from trainer.quantization.linear import FORMATS, QuantizedLinear

SMALL: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": SMALL | {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
    "qwen3 without head_dim": SMALL | {"model_type": "qwen3"},
    "qwen3 with biases": SMALL | {"model_type": "qwen3", "head_dim": 6, "attention_bias": True},
    "qwen2": SMALL | {"model_type": "qwen2", "tie_word_embeddings": True},
    "llama": SMALL | {"model_type": "llama"},
    "llama with biases": SMALL | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama without groups": {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    | {"model_type": "llama"},
    "mistral": SMALL | {"model_type": "mistral", "head_dim": 10},
}


def model_without_memory(config: dict[str, Any]) -> Any:
    """Hugging Face's, on the device that holds nothing."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES.keys())
def test_names_and_shapes_of_each_family_are_hugging_faces(config: dict[str, Any]) -> None:
    expected = {name: tuple(p.shape) for name, p in model_without_memory(config).named_parameters()}
    assert ModelShape.of_config(config).parameters() == expected


@pytest.mark.parametrize("name", CONFIGS)
def test_the_six_shapes_have_the_parameters_of_the_models_themselves(name: str) -> None:
    expected = {key: tuple(p.shape) for key, p in model_without_memory(CONFIGS[name]).named_parameters()}
    shape = ModelShape.of_config(CONFIGS[name])
    assert shape.parameters() == expected
    assert shape.num_parameters == sum(torch.Size(size).numel() for size in expected.values())


def test_counts_are_those_that_were_published() -> None:
    # The model cards' sizes: 0.6B with 0.44B outside of the embedding, 8.2B with 6.95B.
    small, large = (ModelShape.of_config(CONFIGS[name]) for name in ("0.6B", "8B"))
    assert small.num_parameters == 596_049_920
    assert small.num_parameters - 151_936 * 1024 == 440_467_456
    assert large.num_parameters == 8_190_735_360
    assert large.num_parameters - 2 * 151_936 * 4096 == 6_946_075_648


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", [(24, 40), (200, 136), (3, 7)])
def test_bytes_of_a_quantized_layer_are_those_that_the_trainer_holds(
    format: Quantization, size: tuple[int, int]
) -> None:
    rows, columns = size
    config = SMALL | {"model_type": "llama", "hidden_size": columns, "intermediate_size": rows, "head_dim": 8}
    shape = ModelShape.of_config(config)
    held = sum(QuantizedLinear.quantized(torch.randn(one), format=format).num_bytes for one in shape.linears.values())
    assert shape.linear_bytes(format, 2) == 2 * held  # two layers


def test_what_is_not_quantized_keeps_its_type() -> None:
    shape = ModelShape.of_config(FAMILIES["qwen3"])
    rest = shape.num_parameters - shape.num_linear_parameters
    # The embedding, four norms of two layers (two of 24, two of 8 elements) and the last.
    assert rest == 100 * 24 + 2 * (24 + 24 + 8 + 8) + 24
    assert shape.base_bytes("nf4", 2) == shape.linear_bytes("nf4", 2) + 2 * rest
    assert shape.base_bytes(None, 4) == 4 * shape.num_parameters


def test_an_adapter_has_two_matrices_for_each_target() -> None:
    shape = ModelShape.of_config(FAMILIES["qwen3"])
    # q: 24 -> 32, down: 40 -> 24; A is [3, in], B [out, 3].
    assert sorted(shape.adapter(3, ("q_proj", "down_proj"))) == sorted([3 * 32, 3 * 24, 3 * 24, 3 * 40] * 2)


def test_the_cache_has_keys_and_values_of_every_layer() -> None:
    # 2 streams * 2 layers * 2 heads * 8 * 5 tokens * 2 bytes
    assert ModelShape.of_config(FAMILIES["qwen3"]).kv_bytes(5, 2) == 640


def test_a_model_of_another_kind_is_refused_with_what_to_do() -> None:
    with pytest.raises(ShapeError, match=r"model_type is 'qwen3_moe'.*set gpu_memory_utilization \(infer.yaml\)"):
        ModelShape.of_config(SMALL | {"model_type": "qwen3_moe"})
    with pytest.raises(ShapeError, match="has no intermediate_size"):
        ModelShape.of_config({k: v for k, v in FAMILIES["llama"].items() if k != "intermediate_size"})
