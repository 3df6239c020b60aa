"""The checkpoint's own chat template, rendered the way transformers renders it.

The template is code from a checkpoint and is not trusted: it runs in Jinja's immutable sandbox and
sees only strings, never the images or arrays of a message. The environment (trimmed blocks, loop
controls, the `generation` block, `tojson`, `raise_exception`, `strftime_now`, the restricted
`dict` and `namespace`) follows transformers' `utils/chat_template_utils.py`. Tools are not
rendered: a template sees `tools` and `documents` as None.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from qwen3vl_export.errors import BundleError, InputError
from qwen3vl_runtime.messages import ImagePart, Message, TextPart
from qwen3vl_runtime.tokenizer import read_json_object, special_token_strings

__all__ = ["ChatTemplate"]

_RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
# What a template does to values it cannot handle, e.g. `'text' + content_list`, and what one does
# that calls itself without end or builds an endless text.
_RENDER_ERRORS = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError),
    *(RecursionError, MemoryError),
)


class ChatTemplate:
    """A compiled chat template; rendering is free of side effects."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Compile a template.

        Args:
            source: Jinja source.
            special_tokens: Variables such as `bos_token` and `eos_token`.

        Raises:
            BundleError: The source is not valid Jinja.
        """
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except (RecursionError, MemoryError, ValueError) as e:
            raise BundleError(
                f"expected a Jinja chat template, found one that cannot be compiled ({e}); take "
                "the template file from the checkpoint again"
            ) from e
        except jinja2.TemplateSyntaxError as e:
            raise BundleError(
                f"expected a Jinja chat template, found a syntax error in line {e.lineno}: {e}; "
                "take the template file from the checkpoint again"
            ) from e

    @classmethod
    def from_processor_files(cls, folder: str | Path) -> ChatTemplate:
        """Load the template of a checkpoint or of a bundle's `processor/` folder.

        The first of these wins: `chat_template.jinja`, `chat_template.json`, and the key
        `chat_template` of `tokenizer_config.json` (a string, or a list with a "default").

        Raises:
            BundleError: There is no template, or a file is corrupt.
        """
        folder = Path(folder)
        config_path = folder / "tokenizer_config.json"
        config = read_json_object(config_path) if config_path.exists() else {}
        return cls(_find_source(folder, config), special_token_strings(config))

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation to the prompt text, placeholders not yet expanded.

        Args:
            messages: Parsed messages.
            add_generation_prompt: End with the header of the assistant's turn.
            variables: Further template variables, e.g. `{"add_vision_id": True}`.

        Raises:
            InputError: The template refused the messages, or a variable has a reserved name.
        """
        extra = dict(variables or {})
        reserved = [name for name in extra if name in _RESERVED_VARIABLES]
        if reserved:
            raise InputError(f"the template variable {reserved[0]!r} is reserved; rename it")
        context = {
            **self._special_tokens,
            **extra,
            "messages": [_template_message(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(context)
        except _RENDER_ERRORS as e:
            raise InputError(
                f"the checkpoint's chat template refused the messages ({type(e).__name__}: {e}); "
                "change their roles, order or content"
            ) from e


def _find_source(folder: Path, tokenizer_config: Mapping[str, Any]) -> str:
    jinja_path, json_path = folder / "chat_template.jinja", folder / "chat_template.json"
    if jinja_path.exists():
        try:
            return jinja_path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise BundleError(f"expected a text file at {jinja_path}, found: {e}") from e
    found_in, template = "tokenizer_config.json", tokenizer_config.get("chat_template")
    if json_path.exists():
        found_in, template = "chat_template.json", read_json_object(json_path).get("chat_template")
    if isinstance(template, list):
        named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = named[0].get("template") if named else None
    if not isinstance(template, str):
        raise BundleError(
            f"expected a chat template in {folder} (chat_template.jinja, chat_template.json or "
            f"tokenizer_config.json), found {template!r} in {found_in}; copy the template from "
            "the checkpoint"
        )
    return template


def _template_message(message: Message) -> dict[str, Any]:
    """The message as a template knows it: plain dicts and strings, media reduced to their keys."""
    if message.is_plain:
        text = message.parts[0]
        assert isinstance(text, TextPart)
        return {"role": message.role, "content": text.text}
    content: list[dict[str, str]] = []
    for part in message.parts:
        if isinstance(part, TextPart):
            content.append({"type": "text", "text": part.text})
            continue
        kind = "image" if isinstance(part, ImagePart) else "video"
        # Templates test for the key and never print the source, which may be any object.
        source = part.source if isinstance(part.source, str) else f"<{kind}>"
        content.append({"type": kind, kind: source})
    return {"role": message.role, "content": content}


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _TemplateDict()
    environment.globals["namespace"] = _TemplateNamespace
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}` marks assistant text for training; at inference it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _TemplateDict:
    """`dict(...)` for templates, without the attributes of the real type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _TemplateNamespace(Namespace):
    """Jinja's namespace, which may not be given underscore names (a way out of the sandbox)."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # No named parameter, not even self: a template may store an attribute of any name.
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_private_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private_name(name)
        super().__setitem__(name, value)


def _refuse_private_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template may not store the attribute {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's HTML escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
