"""The arguments of a model's chat template (`enable_thinking` for example): which it knows, and files of a model whose
template has some of them set."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo.transport.errors import UserError
from grpo.transport.folders import Content

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
_GIVEN = {"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"}
"""Names that whoever renders gives to every template."""
_ASKS = {"defined", "undefined", "default", "d"}
"""Tests and filters by which a template asks whether somebody has given a name that it sets itself otherwise."""
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""transformers' own tag, which jinja does not know: it marks what an assistant has said."""


def templates_in(files: Mapping[str, bytes]) -> list[str]:
    """Returns the chat templates of a model, as transformers finds them: those of tokenizer_config.json count where
    there is no chat_template.jinja."""
    if (data := files.get(TEMPLATE_FILE)) is not None:
        return [data.decode()]
    found = json.loads(files.get(CONFIG_FILE, b"{}")).get("chat_template") or []
    return [found] if isinstance(found, str) else [one["template"] for one in found]


def known_arguments(templates: list[str]) -> list[str]:
    """Returns the names that templates read and nobody gives them, sorted: what can be an argument."""
    from jinja2 import Environment, TemplateError, meta, nodes

    names = set[str]()
    for template in templates:
        try:
            tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", template))
        except TemplateError as error:
            raise UserError(f"the model's chat template is no jinja template: {error}; mend it") from error
        own = {one.name for one in tree.find_all(nodes.Name) if one.ctx == "store"}
        asked = {one.node.name for one in tree.find_all((nodes.Test, nodes.Filter))
                 if isinstance(one.node, nodes.Name) and one.name in _ASKS}  # fmt: skip
        names |= meta.find_undeclared_variables(tree) - (own - asked)
    return sorted(name for name in names - _GIVEN if not name.endswith("_token"))


def unused_arguments(folder: Path, arguments: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Returns the arguments that the chat template of the model in `folder` does not use, and those that it knows."""
    names = (TEMPLATE_FILE, CONFIG_FILE)
    files = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    known = known_arguments(templates_in(files)) if arguments else []
    return [name for name in arguments if name not in known], known


def check_arguments(folder: Path, arguments: Mapping[str, Any]) -> None:
    """Raises UserError for an argument that the chat template of the model in `folder` does not use."""
    unused, known = unused_arguments(folder, arguments)
    if unused:
        raise UserError(f"chat_template_kwargs has {', '.join(unused)}, which is {not_used(known)}; remove it")


def not_used(known: list[str]) -> str:
    """Returns what is wrong with an argument that a template does not use, which knows others."""
    return f"not used by the model's chat template, which knows {', '.join(known) or 'no arguments'}"


def with_arguments(files: Mapping[str, Content], arguments: Mapping[str, Any]) -> dict[str, Content]:
    """Returns a model's files with chat templates that have these arguments, for whoever renders without giving
    them."""
    changed = dict(files)
    if not arguments:
        return changed
    # trim_blocks, with which templates are rendered, takes the newline behind the last tag away.
    begin = "".join(
        f"{{% if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}"
        for name, value in arguments.items()
    )
    if isinstance(template := files.get(TEMPLATE_FILE), bytes):
        return changed | {TEMPLATE_FILE: f"{begin}\n".encode() + template}
    if isinstance(data := files.get(CONFIG_FILE), bytes):
        config = json.loads(data)
        if isinstance(found := config.get("chat_template"), str):
            config["chat_template"] = f"{begin}\n{found}"
        for one in found if isinstance(found, list) else ():
            one["template"] = f"{begin}\n{one['template']}"
        changed[CONFIG_FILE] = json.dumps(config, indent=2, ensure_ascii=False).encode()
    return changed
