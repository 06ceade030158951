"""Chat templates of public formats, in our own words, over the quickstart model's tokenizer of bytes."""

import shutil
from pathlib import Path

from grpo.orchestrator.renderer import ChatRenderer
from transformers import AddedToken, PreTrainedTokenizerFast

from tests.orchestrator.fakes import MODEL
from tools.random_models import CHAT_TEMPLATES

CHATML = """
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' -%}
<|im_start|>system
Help.<|im_end|>
{% endif -%}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""

LLAMA3 = """
{%- set shown = messages -%}
{%- for message in shown -%}
{%- set turn = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim -%}
{%- set turn = turn + '<|eot_id|>' -%}
{%- if loop.index0 == 0 -%}{%- set turn = '<|begin_of_text|>' + turn -%}{%- endif -%}
{{ turn }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}
"""

LLAMA32 = (CHAT_TEMPLATES / "llama3.jinja").read_text()

GEMMA = """
{%- if messages[0].role == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{{ '<bos>' }}
{%- for message in messages -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{{ '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""

PHI3 = """
{%- for message in messages -%}
{%- if message.role in ('user', 'assistant') or (message.role == 'system' and message.content) -%}
{{ '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}
{%- endif -%}
{%- endfor -%}
{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}
"""

LFM2 = (CHAT_TEMPLATES / "lfm2.jinja").read_text()

QWEN3 = (CHAT_TEMPLATES / "qwen3.jinja").read_text()

PLAIN = """
{%- for message in messages -%}
{{ message.role + ': ' + message.content + '\n\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant:' }}{%- endif -%}
"""

TWICE = """
from grpo import Environment, MultiTurnEpisode, Parser, Rubric

def right(completion, parsed):
    return float(completion == "5" and parsed.thinking in ("", "2 + 3"))

class Twice(MultiTurnEpisode, Environment):
    rubric = Rubric([right], parser=Parser())
    max_turns = 2
    def dataset(self, split):
        return [{"prompt": f"2 + 3? ({number})"} for number in range(8)]
    async def respond(self, state, ctx):
        return "Sure?"
"""
"""An environment of two turns, the second of which asks again."""

CONTROL = (
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<bos>", "<start_of_turn>", "<end_of_turn>", "<|startoftext|>", "<|tool_list_start|>", "<|tool_list_end|>"),
    *("<|tool_response_start|>", "<|tool_response_end|>", "<|endoftext|>"),
)
RIGHT_STRIPPED = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
"""Phi's, which take the white space behind them into themselves."""
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """Bytes, the control tokens of all these formats, and marks that are tokens but no control tokens. None: with the
    quickstart model's own template."""
    made = PreTrainedTokenizerFast.from_pretrained(MODEL)
    made.add_tokens(list(CONTROL), special_tokens=True)
    made.add_tokens([AddedToken(one, rstrip=True, special=True) for one in RIGHT_STRIPPED], special_tokens=True)
    made.add_tokens(list(MARKS))
    if template is not None:
        made.chat_template = template
    return made


def renderer(template: str | None, **arguments: object) -> ChatRenderer:
    """Of that tokenizer, with these arguments of the template."""
    return ChatRenderer(tokenizer(template), arguments)


def model_with(folder: Path, template: str) -> Path:
    """A copy of the quickstart model, whose tokenizer has ChatML's control tokens, with this chat template."""
    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(template)
    return folder
