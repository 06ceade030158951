"""`from grpo import …`: all that people's own files need, without what takes long to import."""

import subprocess
import sys

import grpo
from grpo import api


def test_every_name_is_there() -> None:
    assert [name for name in api.__all__ if not hasattr(grpo, name)] == []


def test_nothing_heavy_is_needed_for_it() -> None:
    code = (
        "import sys; sys.modules |= dict.fromkeys(('torch', 'transformers', 'vllm', 'matplotlib', 'wandb'))\n"
        "import grpo; assert 'orchestrator' not in sys.modules\n"
        "from grpo import Environment, Rubric, Episode"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
