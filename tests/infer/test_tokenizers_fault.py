"""What is said of a model whose tokenizer or chat template stops vLLM."""

import shutil
from pathlib import Path

from infer.server import _tokenizers_fault

MODEL = Path(__file__).parents[2] / "configs" / "quickstart" / "model"


def test_a_missing_tokenizer_and_a_broken_template_are_told_and_a_whole_one_is_not(tmp_path: Path) -> None:
    model = shutil.copytree(MODEL, tmp_path / "model")
    assert _tokenizers_fault(model) is None
    (model / "chat_template.jinja").write_text("{{ messages | nofilter }}")
    assert "nofilter" in str(_tokenizers_fault(model))
    for file in model.glob("tokenizer*"):
        file.unlink()
    assert "tokenizer.json" in str(_tokenizers_fault(model))
