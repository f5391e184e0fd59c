"""The chat template: messages to prompt text, exactly as the model's own template renders them.

The rules are those of Hugging Face's ``apply_chat_template``: an immutable sandbox, trimmed blocks, loop controls, a
``tojson`` that does not escape HTML, ``raise_exception`` and ``strftime_now``. Its own function is not used: it costs
48 us per call where a cached compiled template costs 17, and it would bring all of transformers into the API process.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.wire.errors import InvalidRequestError, StartupError

Message = Mapping[str, str]
"""One chat message: ``role`` and ``content`` (and ``name`` where the caller gave one)."""


class ChatTemplate:
    """One compiled template; rendering is pure and cheap."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile.

        special_tokens: what the template may name, such as ``bos_token``.

        Raises:
            StartupError: the source is no valid template.
        """
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise StartupError(f"the model's chat template does not compile: {error}") from error
        # A plain dict: the chain of maps that jinja makes of its globals is copied at every rendering, in 30 us.
        self._template.globals = dict(self._template.globals)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message]) -> str:
        """Return the prompt text, ending where the assistant's answer begins.

        Raises:
            InvalidRequestError: the template refuses these messages (``field`` is ``messages``).
        """
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise InvalidRequestError(f"the model's chat template refuses this: {error}", "messages") from error


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's tokens for training; when serving it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
