"""The real server in bfloat16, whose attention takes AMX where the processor has it, with the LM head in float32."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from infer.canary import HALF_TOLERANCE
from tests.infer.server_process import running

pytestmark = pytest.mark.e2e

MODEL = Path(__file__).parents[2] / "configs/quickstart/model"
IDS = [30 + (7 * i * i + 3) % 60 for i in range(40)]


def test_a_server_in_bfloat16_with_its_head_in_float32_scores_as_hugging_face_does(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    with torch.no_grad():
        hidden = model.model(torch.tensor([IDS])).last_hidden_state
        logprobs = (hidden.float() @ model.lm_head.weight.float().T).log_softmax(-1)[0, :-1]
    expected = logprobs.gather(1, torch.tensor(IDS)[1:, None])[:, 0]
    settings = {"max_model_len": 64, "dtype": "bfloat16", "fp32_lm_head": True}
    with running(log=tmp_path / "log", model=MODEL, output_dir=tmp_path / "run", **settings) as server:
        found = torch.tensor(server.answer("/policy/score", version=None, token_ids=IDS)["logprobs"])
    assert (found - expected).abs().mean() < HALF_TOLERANCE["bfloat16"] / 2
