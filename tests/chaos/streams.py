"""Load of many open requests of mixed kinds at once, their whole answers, and the comparison with an unbroken run."""

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
MAX_DIVERGED = 2

_TIMEOUT_S = 120.0
_CHAT, _COMPLETION = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, slots=True)
class Request:
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
    """One choice as its caller has it in the end. tokens: with log-probabilities, where these were requested."""

    text: str = ""
    finish_reason: str | None = None
    tokens: list[Token] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    """Everything in an answer that must not depend on the rank that computed it."""

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


def mixed_requests(
    num_requests: int, max_tokens: int, model: str = "sim", extra: Sequence[dict[str, Any]] = ()
) -> list[Request]:
    """Return that many requests: greedy and seeded, with stop strings, several choices, streamed and whole.

    extra: fields of further kinds that the model can do.
    """
    requests = []
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
    for number in range(num_requests):
        kind = dict(kinds[number % len(kinds)])
        path = kind.pop("path", _CHAT)
        text = f"stream {number}: " + "why do fish swim in schools? " * (1 + number % 4)
        prompt = {"prompt": text} if path == _COMPLETION else {"messages": [{"role": "user", "content": text}]}
        body = {"model": model, "max_tokens": max_tokens + 7 * (number % 5), "seed": number, "ignore_eos": True}
        body |= {"stream": True, **prompt, **kind}
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        requests.append(Request(path, body))
    return requests


async def send_all(
    url: str, requests: Sequence[Request], meanwhile: Callable[[], Awaitable[None]] | None = None
) -> list[Answer]:
    """Send all at once and return their answers; ``meanwhile`` runs as soon as each stream has begun."""
    limits = httpx.Limits(max_connections=len(requests))
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=limits, trust_env=False) as client:
        answers = [Answer() for _ in requests]
        began = [asyncio.Event() for _ in requests]
        tasks = [asyncio.create_task(_send(client, *each)) for each in zip(requests, answers, began, strict=True)]
        try:
            if meanwhile is not None:
                pairs = zip(requests, began, strict=True)
                await asyncio.gather(*(event.wait() for request, event in pairs if request.body["stream"]))
                await meanwhile()
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return answers


async def _send(client: httpx.AsyncClient, request: Request, answer: Answer, began: asyncio.Event) -> None:
    async with client.stream("POST", request.path, json=request.body) as response:
        try:
            if response.status_code != httpx.codes.OK or not request.body["stream"]:
                answer.take(json.loads(await response.aread()))
                return
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    answer.take(json.loads(line.removeprefix("data: ")))
                    began.set()
        finally:
            began.set()


def differences(requests: Sequence[Request], unbroken: Sequence[Answer], answers: Sequence[Answer]) -> list[str]:
    """Return one line for each answer that is not that of the unbroken run."""
    return [
        f"{request.body} gave {got}, unbroken {expected}"
        for request, expected, got in zip(requests, unbroken, answers, strict=True)
        if got != expected
    ]


def differences_within_margin(
    requests: Sequence[Request], unbroken: Sequence[Answer], answers: Sequence[Answer]
) -> list[str]:
    """Return one line for each answer that is not that of the unbroken run, on a real model in float32.

    An answer may diverge where two tokens are as good as equal, which is printed. Greedy ones with log-probabilities
    show how close the two were; drawn ones do not, so ``MAX_DIVERGED`` of them may: about one draw in 20,000 is that
    close.
    """
    different = [
        (request, expected, got)
        for request, expected, got in zip(requests, unbroken, answers, strict=True)
        if got.error or _texts(got) != _texts(expected)
    ]
    unproven = [
        f"{request.body} gave {got}, unbroken {expected}"
        for request, expected, got in different
        if got.error or not _diverges_at_a_tie(expected.choices[0], got.choices[0])
    ]
    broken = [got for _, expected, got in different if got.error or got.choices.keys() != expected.choices.keys()]
    sys.stdout.write(
        f"{len(different)} of {len(requests)} diverged, {len(unproven)} of them at a draw\n" * bool(different)
    )
    return [] if len(unproven) <= MAX_DIVERGED and not broken else unproven


def _texts(answer: Answer) -> Any:
    choices = {index: (choice.text, choice.finish_reason) for index, choice in answer.choices.items()}
    return choices, answer.usage


def _diverges_at_a_tie(expected: Choice, got: Choice) -> bool:
    pairs = zip(expected.tokens, got.tokens, strict=False)
    margin = next((ours.margin for ours, theirs in pairs if ours.text != theirs.text), None)
    if margin is None or margin > TIE:
        return False
    sys.stdout.write(f"a stream diverged from the unbroken run at a margin of {margin:g}\n")
    return True
