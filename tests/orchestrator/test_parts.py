"""What the settings are made into."""

import json
from pathlib import Path

import pytest

from orchestrator.parts import vocab_size
from tests.orchestrator.fakes import MODEL


def test_the_vocabulary_is_as_large_as_the_models_configuration_says(tmp_path: Path) -> None:
    assert vocab_size(MODEL) == 259
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "x", "text_config": {"vocab_size": 7}}))
    assert vocab_size(tmp_path) == 7
    config.write_text("{}")
    with pytest.raises(ValueError, match="vocab_size"):
        vocab_size(tmp_path)
