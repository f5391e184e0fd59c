"""Log-probabilities in the shapes of the two endpoints."""

from collections.abc import Sequence
from typing import Any

from orchestrator.llm.choice_logprobs import TokenLogprob
from orchestrator.llm.token_texts import TokenText

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON has no number for; OpenAI's clients know it."""


PromptLogprobs = list[dict[str, Any] | None]


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return ``logprobs`` of a chat choice."""
    return {"content": [_chat_token(token) for token in tokens], "refusal": None}


def completion_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return ``logprobs`` of a completion choice; the token itself is among the best ones even when it is none."""
    return {
        "tokens": [token.token.text for token in tokens],
        "token_logprobs": [_number(token.logprob) for token in tokens],
        "top_logprobs": [_top_by_text(token) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def prompt_logprobs(tokens: Sequence[TokenLogprob]) -> PromptLogprobs:
    """Return vLLM's ``prompt_logprobs``: for each token, by id, its own log-probability and the best ones."""
    return [None if token.logprob is None else _top_by_id(token) for token in tokens]


def _chat_token(token: TokenLogprob) -> dict[str, Any]:
    top = [_named(text, value) for _, text, value in token.top]
    return _named(token.token, token.logprob) | {"top_logprobs": top}


def _named(token: TokenText, logprob: float | None) -> dict[str, Any]:
    return {"token": token.text, "logprob": _number(logprob), "bytes": list(token.data)}


def _top_by_text(token: TokenLogprob) -> dict[str, float | None] | None:
    if token.logprob is None:
        return None
    best = {text.text: _number(value) for _, text, value in reversed(token.top)}  # of two alike the better one counts
    return dict(reversed(best.items())) | {token.token.text: _number(token.logprob)}


def _top_by_id(token: TokenLogprob) -> dict[str, dict[str, Any]]:
    told = [*token.top, (token.token_id, token.token, token.logprob)]
    return {str(token_id): {"logprob": _number(value), "decoded_token": text.text} for token_id, text, value in told}


def _number(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LOWEST)
