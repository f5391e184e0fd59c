"""Many open streams of mixed kinds at once, and what each of them said in the end."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

NUM_STREAMS = 64
TIE = 1e-3
"""Two log-probabilities this close may change places when they are computed anew among other rows, in float32."""
MAX_PARTED = 2

_TIMEOUT_S = 120.0
_CHAT, _COMPLETION = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    path: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Token:
    """One token. margin: between the two best log-probabilities where it was drawn."""

    text: str
    logprob: float
    margin: float


@dataclass(slots=True)
class Choice:
    """One choice as its caller has it in the end. tokens: with log-probabilities, where they were asked for."""

    text: str = ""
    finish_reason: str | None = None
    tokens: list[Token] = field(default_factory=list)


@dataclass(slots=True)
class Said:
    """Everything an answer said that must not depend on where it was computed."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: tuple[int, int] = (0, 0)
    error: Any = None

    def take(self, message: dict[str, Any]) -> None:
        """Add one chunk, or a whole answer."""
        self.error = self.error or message.get("error")
        for part in message.get("choices", []):
            choice = self.choices.setdefault(part["index"], Choice())
            content = part.get("delta") or part.get("message") or {}
            choice.text += content.get("content") or part.get("text") or ""
            choice.finish_reason = part.get("finish_reason") or choice.finish_reason
            for token in (part.get("logprobs") or {}).get("content") or []:
                best = [top["logprob"] for top in token["top_logprobs"]]
                choice.tokens.append(Token(token["token"], token["logprob"], best[0] - best[1]))
        if usage := message.get("usage"):
            self.usage = usage["prompt_tokens"], usage["completion_tokens"]


def mixed_asks(num_asks: int, max_tokens: int, model: str = "sim", extra: Sequence[dict[str, Any]] = ()) -> list[Ask]:
    """Return that many requests: greedy and seeded, with stop strings, several choices, streamed and whole.

    extra: fields of further kinds that the model can do.
    """
    asks = []
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 1.0, "stop": ["ki", "zo", "ut", "bi"]},
        {"temperature": 0.7, "n": 2},
        {"temperature": 0.8, "stream": False},
        {"temperature": 0.6, "frequency_penalty": 0.5, "presence_penalty": 0.3},
        {"temperature": 1.0, "path": _COMPLETION},
        *extra,
    ]
    for number in range(num_asks):
        kind = dict(kinds[number % len(kinds)])
        path = kind.pop("path", _CHAT)
        text = f"stream {number}: " + "why do fish swim in schools? " * (1 + number % 4)
        asked = {"prompt": text} if path == _COMPLETION else {"messages": [{"role": "user", "content": text}]}
        body = {"model": model, "max_tokens": max_tokens + 7 * (number % 5), "seed": number, "ignore_eos": True}
        body |= {"stream": True, **asked, **kind}
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        asks.append(Ask(path, body))
    return asks


async def ask_all(url: str, asks: Sequence[Ask], meanwhile: Callable[[], Awaitable[None]] | None = None) -> list[Said]:
    """Send all at once and return what each said; ``meanwhile`` runs as soon as each stream has begun."""
    limits = httpx.Limits(max_connections=len(asks))
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=limits, trust_env=False) as client:
        said = [Said() for _ in asks]
        began = [asyncio.Event() for _ in asks]
        tasks = [
            asyncio.create_task(_ask(client, ask, into, event))
            for ask, into, event in zip(asks, said, began, strict=True)
        ]
        try:
            if meanwhile is not None:
                await asyncio.gather(
                    *(event.wait() for ask, event in zip(asks, began, strict=True) if ask.body["stream"])
                )
                await meanwhile()
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return said


async def _ask(client: httpx.AsyncClient, ask: Ask, said: Said, began: asyncio.Event) -> None:
    async with client.stream("POST", ask.path, json=ask.body) as answer:
        try:
            if answer.status_code != httpx.codes.OK or not ask.body["stream"]:
                said.take(json.loads(await answer.aread()))
                return
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    said.take(json.loads(line.removeprefix("data: ")))
                    began.set()
        finally:
            began.set()


def differences(asks: Sequence[Ask], unbroken: Sequence[Said], said: Sequence[Said]) -> list[str]:
    """Return one line for each answer that is not what the unbroken run said."""
    return [
        f"{ask.body} said {got}, unbroken {expected}"
        for ask, expected, got in zip(asks, unbroken, said, strict=True)
        if got != expected
    ]


def differences_within_margin(asks: Sequence[Ask], unbroken: Sequence[Said], said: Sequence[Said]) -> list[str]:
    """Return one line for each answer that is not what the unbroken run said, on a real model in float32.

    An answer may part from it where two tokens are as good as equal, which is printed. Of greedy ones with
    log-probabilities that is checked; of drawn ones nobody tells how close the draw was, so ``MAX_PARTED`` of them may:
    about one draw in 20,000 is that close.
    """
    different = [
        (ask, expected, got)
        for ask, expected, got in zip(asks, unbroken, said, strict=True)
        if got.error or _texts(got) != _texts(expected)
    ]
    unproven = [
        f"{ask.body} said {got}, unbroken {expected}"
        for ask, expected, got in different
        if got.error or not _parts_at_a_tie(expected.choices[0], got.choices[0])
    ]
    broken = [got for _, expected, got in different if got.error or got.choices.keys() != expected.choices.keys()]
    sys.stdout.write(f"{len(different)} of {len(asks)} parted, {len(unproven)} of them at a draw\n" * bool(different))
    return [] if len(unproven) <= MAX_PARTED and not broken else unproven


def _texts(said: Said) -> Any:
    choices = {index: (choice.text, choice.finish_reason) for index, choice in said.choices.items()}
    return choices, said.usage


def _parts_at_a_tie(expected: Choice, got: Choice) -> bool:
    pairs = zip(expected.tokens, got.tokens, strict=False)
    margin = next((ours.margin for ours, theirs in pairs if ours.text != theirs.text), None)
    if margin is None or margin > TIE:
        return False
    sys.stdout.write(f"a stream parted from the unbroken run at a margin of {margin:g}\n")
    return True
