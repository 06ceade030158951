"""`from grpo import …`: all that people's own files need, without what takes long to import."""

import subprocess
import sys

import grpo
from grpo import api


def test_every_name_is_there() -> None:
    assert [name for name in api.__all__ if not hasattr(grpo, name)] == []


def test_nothing_heavy_is_imported_with_it() -> None:
    code = (
        "import sys, grpo; before = set(sys.modules); from grpo import Environment\n"
        "assert 'orchestrator' not in before and 'grpo.api' not in before\n"
        "print(sorted({'torch', 'transformers', 'vllm', 'matplotlib', 'openai', 'wandb'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
