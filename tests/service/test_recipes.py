"""Recipes of tinker-cookbook, unchanged but for model, renderer and sizes, on the embedded model. As people's scripts
they are processes of their own."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.service.running import running
from tests.service.test_sampling import MODEL

pytestmark = [
    pytest.mark.service,
    pytest.mark.skipif(
        find_spec("tinker_cookbook") is None or find_spec("chz") is None,
        reason="needs tinker-cookbook: pip install tinker-cookbook",
    ),
]
# As `recipes/sl_basic.py`, whose own `main` looks up a renderer by the names of known models.
SL_BASIC = """
import asyncio, sys
from pathlib import Path
import tinker_cookbook
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

model, log = sys.argv[1:]
common = ChatDatasetBuilderCommonConfig(
    model_name_for_tokenizer=model, renderer_name="role_colon", max_length=512, batch_size=8,
    train_on_what=TrainOnWhat.ALL_ASSISTANT_MESSAGES)
examples = Path(tinker_cookbook.__file__).parent / "example_data" / "conversations.jsonl"
dataset = FromConversationFileBuilder(common_config=common, file_path=str(examples))
asyncio.run(train.main(train.Config(
    log_path=log, model_name=model, recipe_name="recipe_sl_basic", renderer_name="role_colon", dataset_builder=dataset,
    learning_rate=5e-3, lr_schedule="linear", num_epochs=2, eval_every=0, lora_rank=8)))
"""


def test_sl_basic_on_its_example_data_falls(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running(tmp_path / "run", MODEL, "--no_sampling", "--sequence_len", "1024") as service:
        where = {"TINKER_BASE_URL": service.about["base_url"], "TINKER_API_KEY": service.about["api_key"]}
        command = [sys.executable, "-c", SL_BASIC, str(MODEL), str(log)]
        done = subprocess.run(command, env=os.environ | where, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [json.loads(line)["train_mean_nll"] for line in (log / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) >= 20
    assert losses[-1] < 0.6 * losses[0], losses
