"""Chat templates of public formats, in our own words, over the quickstart model's tokenizer of bytes."""

import shutil
from pathlib import Path

from grpo.orchestrator.renderer import ChatRenderer
from transformers import AddedToken, PreTrainedTokenizerFast

from tests.orchestrator.fakes import MODEL

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

LLAMA32 = """
{%- set date = date_string if date_string is defined else strftime_now('%d %b %Y') -%}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' -%}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages -%}
{{ '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools -%}{{ 'Environment: ipython\n' }}{%- endif -%}
{{ 'Cutting Knowledge Date: December 2023\nToday Date: ' + date + '\n\n' + system + '<|eot_id|>' }}
{%- for message in rest -%}
{%- set is_result = message.role == 'tool' and not (tools and loop.first) -%}
{%- set role = 'ipython' if is_result else 'user' if tools and loop.first else message.role -%}
{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}
{%- if tools and loop.first -%}
{{ 'Given the following functions, please respond with a JSON for a function call ' }}
{{- 'with its proper arguments that best answers the given prompt.\n\nRespond in the format ' }}
{{- '{"name": function name, "parameters": dictionary of argument name and its value}.' }}
{{- 'Do not use variables.\n\n' }}
{%- for tool in tools -%}{{ tool | tojson(indent=4) + '\n\n' }}{%- endfor -%}
{%- endif -%}
{{ (message.content | tojson if is_result else message.content | trim) + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}
"""

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

LFM2 = """
{%- set rest = messages[1:] if messages[0].role == 'system' else messages -%}
{%- set told = namespace(system=messages[0].content if messages[0].role == 'system' else '') -%}
{%- if tools -%}
{%- set told.system = told.system + ('\n' if told.system else '') + 'List of tools: <|tool_list_start|>[' -%}
{%- for tool in tools -%}
{%- set told.system = told.system + tool | tojson + ('' if loop.last else ', ') -%}
{%- endfor -%}
{%- set told.system = told.system + ']<|tool_list_end|>' -%}
{%- endif -%}
{{ '<|startoftext|>' }}
{%- if told.system -%}{{ '<|im_start|>system\n' + told.system + '<|im_end|>\n' }}{%- endif -%}
{%- for message in rest -%}
{%- set said = message.content -%}
{%- if message.role == 'tool' -%}
{%- set said = '<|tool_response_start|>' + said + '<|tool_response_end|>' -%}
{%- endif -%}
{{ '<|im_start|>' + message.role + '\n' + said + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""

QWEN3 = """
{%- if tools -%}
{{ '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' -%}{{ messages[0].content + '\n\n' }}{%- endif -%}
{{ '# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function ' }}
{{- 'signatures within <tools></tools> XML tags:\n<tools>' }}
{%- for tool in tools -%}{{ '\n' + tool | tojson }}{%- endfor -%}
{{ '\n</tools>\n\nFor each function call, return a json object with function name and arguments within ' }}
{{- '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n' }}
{{- '</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' -%}
{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif -%}
{%- set found = namespace(query=messages | length - 1) -%}
{%- for message in messages -%}
{%- set told = message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>') -%}
{%- if message.role == 'user' and not told -%}{%- set found.query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' -%}
{%- set answer = message.content -%}
{%- set thought = '' -%}
{%- if '</think>' in answer -%}
{%- set thought = answer.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
{%- set answer = answer.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{ '<|im_start|>assistant\n' }}
{%- if loop.index0 > found.query and (loop.last or thought) -%}
{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + answer.lstrip('\n') }}
{%- else -%}
{{ answer }}
{%- endif -%}
{{ '<|im_end|>\n' }}
{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ '<|im_end|>\n' }}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}
{%- endif -%}
"""

PLAIN = """
{%- for message in messages -%}
{{ message.role + ': ' + message.content + '\n\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant:' }}{%- endif -%}
"""

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
