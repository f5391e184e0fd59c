"""Grammars are tried in a process that may die of them."""

import asyncio
import json
from typing import Any

import pytest

from engine.wire.errors import InvalidRequestError
from orchestrator.llm.grammar import MAX_GRAMMAR_CHARACTERS, Grammar, GrammarChecker

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def endless(longest: int) -> Grammar:
    """Return a schema whose compilation takes ten times as long with every second pattern more."""
    patterns = [{"type": "string", "pattern": f"a{{0,{length}}}.*b"} for length in range(10, longest)]
    return Grammar.json_schema({"allOf": patterns})


async def test_a_grammar_comes_back_in_the_engines_form_and_is_asked_once() -> None:
    checker = GrammarChecker()
    schema = await checker.check(Grammar.json_schema(SCHEMA))
    assert json.loads(schema)["grammars"][0]["json_schema"]["required"] == ["a"]
    assert "start: " in await checker.check(Grammar.regex("[ab]+", "guided_regex"))
    assert "start: " in await checker.check(Grammar.lark('start: "a" | "b"', "guided_grammar"))
    assert checker._known.keys() >= {Grammar.json_schema(SCHEMA, "another").key}
    await checker.aclose()
    await checker.aclose()
    assert await checker.check(Grammar.json_schema(SCHEMA)) == schema, "what is known needs no process"


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar.json_schema({"type": "strin"}), "strin"),
        (Grammar.json_schema({"type": "integer", "minimum": 3, "maximum": 2}), "minimum"),
        (Grammar.json_schema({"$ref": "https://example.org/x"}), "example.org"),
        (Grammar.regex("a(", "guided_regex"), "unclosed group"),
        (Grammar.regex("a(?=b)", "guided_regex"), "look-ahead"),
        (Grammar.lark("start: nowhere", "guided_grammar"), "nowhere"),
        (Grammar.lark("", "guided_grammar"), "mpty"),
        (Grammar.regex("a" * (MAX_GRAMMAR_CHARACTERS + 1), "guided_regex"), str(MAX_GRAMMAR_CHARACTERS)),
    ],
)
async def test_what_is_no_grammar_is_refused_with_field_and_reason(grammar: Grammar, reason: str) -> None:
    checker = GrammarChecker()
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        await checker.check(grammar)
    assert caught.value.field == grammar.field
    assert str(caught.value).startswith(grammar.field)
    await checker.aclose()


async def test_a_grammar_without_end_costs_its_process_and_nothing_else() -> None:
    checker = GrammarChecker()
    for _ in range(2):  # the second time it is known
        with pytest.raises(InvalidRequestError, match="takes more than 1 s"):
            await checker.check(endless(40))
    assert await checker.check(Grammar.regex("a"))
    await checker.aclose()


async def test_closing_does_not_wait_for_a_grammar() -> None:
    checker = GrammarChecker()
    await checker.check(Grammar.regex("a"))
    trying: asyncio.Task[Any] = asyncio.ensure_future(checker.check(endless(40)))
    await asyncio.sleep(0)
    await checker.aclose()
    with pytest.raises(InvalidRequestError, match="bear"):
        await trying
