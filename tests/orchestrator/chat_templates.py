"""Chat templates of public formats, in our own words, over the quickstart model's tokenizer of bytes."""

from grpo.orchestrator.renderer import ChatRenderer
from transformers import PreTrainedTokenizerFast

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

QWEN3 = """
{%- if tools -%}
{{ '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' -%}{{ messages[0].content + '\n\n' }}{%- endif -%}
{{ 'Tools:' }}
{%- for tool in tools -%}{{ '\n' + tool | tojson }}{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' -%}
{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif -%}
{%- set found = namespace(query=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set found.query = loop.index0 -%}{%- endif -%}
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
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""

PLAIN = """
{%- for message in messages -%}
{{ message.role + ': ' + message.content + '\n\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant:' }}{%- endif -%}
"""

CONTROL = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """Bytes, the control tokens of all these formats, and marks that are tokens but no control tokens. None: with the
    quickstart model's own template."""
    made = PreTrainedTokenizerFast.from_pretrained(MODEL)
    made.add_tokens(list(CONTROL), special_tokens=True)
    made.add_tokens(list(MARKS))
    if template is not None:
        made.chat_template = template
    return made


def renderer(template: str | None) -> ChatRenderer:
    """Of that tokenizer."""
    return ChatRenderer(tokenizer(template))
