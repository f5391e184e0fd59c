"""Everything that can be asked of tokens, from OpenAI's client down to a real model in a real engine process."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.integration.serving import deployment as serve
from tests.unit.runner.byte_tokenizer import EOS, VOCAB_SIZE, encode, save_byte_tokenizer

MODEL = "tiny"
POISON = "\x07"
DEADLINE_S = 60.0
PROMPT = "A shoal of fish"
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["fish", "shoal"]}, "big": {"type": "boolean"}},
    "required": ["kind", "big"],
    "additionalProperties": False,
}


def save_model(folder: Path, *, poisoned: bool = True) -> None:
    """Save a random model over bytes; poisoned, one byte has an embedding that is not a number."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.25,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=EOS,
    )
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    if poisoned:
        with torch.no_grad():
            model.model.embed_tokens.weight[encode(POISON)[0]] = torch.nan
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / MODEL
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tqdm, "monitor_interval", 0)
        save_model(folder)
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    options = ("--executor", "local", "--device", "cpu", "--dtype", "float32", "--kv-cache-memory", "8MiB")
    with serve("--model", str(folder), "--served-model-name", MODEL, *options) as served:
        url = served.wait_ready()
        # The first grammar starts a process that stays; it would count as the leak of the test that sent it.
        body = {"model": MODEL, "prompt": PROMPT, "guided_regex": "a"}
        httpx.post(f"{url}/v1/completions", json=body, timeout=DEADLINE_S).raise_for_status()
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
        yield client


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=DEADLINE_S, trust_env=False) as client:
        yield client


def complete(http: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "seed": 5} | fields
    return http.post("/v1/completions", json=body)


def text_of(http: httpx.Client, **fields: Any) -> str:
    answer = complete(http, **fields)
    assert answer.status_code == httpx.codes.OK, answer.text
    return str(answer.json()["choices"][0]["text"])


def log_probabilities(folder: Path, text: str) -> torch.Tensor:
    """Return what transformers says of what follows each byte of a text."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        scores: torch.Tensor = model(torch.tensor([encode(text)])).logits[0]
    return scores.log_softmax(dim=-1)


# --- log-probabilities ----------------------------------------------------------------------------------------------


def test_an_echoed_completion_has_the_models_log_probabilities_of_prompt_and_output(
    client: openai.OpenAI, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    common: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 3, "echo": True}
    letters = encode("abcdefghijklmnopqrstuvwxyz")
    answer = client.completions.create(**common, extra_body={"allowed_token_ids": letters}).choices[0]
    assert answer.text.startswith(PROMPT)
    assert len(answer.text) == len(PROMPT) + 6
    assert answer.logprobs is not None
    assert "".join(answer.logprobs.tokens or []) == answer.text
    assert answer.logprobs.text_offset == list(range(len(answer.text)))
    expected = log_probabilities(folder, answer.text)
    told = answer.logprobs.token_logprobs or []
    assert told[0] is None
    for position, token in enumerate(encode(answer.text)[1:], start=1):
        assert told[position] == pytest.approx(expected[position - 1, token].item(), abs=1e-3)
        top = (answer.logprobs.top_logprobs or [])[position]
        assert max(top.values()) == pytest.approx(expected[position - 1].max().item(), abs=1e-3)
    # again, with the beginning in the prefix cache now; and streamed
    again = client.completions.create(**common, extra_body={"allowed_token_ids": letters}).choices[0]
    assert again.logprobs is not None
    assert again.logprobs.token_logprobs == pytest.approx(told, abs=1e-3)
    chunks = list(client.completions.create(**common, extra_body={"allowed_token_ids": letters}, stream=True))
    parts = [chunk.choices[0] for chunk in chunks]
    assert "".join(part.text for part in parts) == answer.text
    assert [token for part in parts if part.logprobs for token in part.logprobs.tokens or []] == answer.logprobs.tokens


def test_a_chat_streams_the_log_probabilities_it_tells_whole(client: openai.OpenAI) -> None:
    common: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 8,
        "seed": 4,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"allowed_token_ids": encode("abcdef")},
    }
    (choice,) = client.chat.completions.create(**common).choices
    assert choice.logprobs is not None
    whole = choice.logprobs.content or []
    assert b"".join(bytes(token.bytes or []) for token in whole).decode() == choice.message.content
    assert all(len(token.top_logprobs) == 2 for token in whole)
    assert all(token.logprob <= token.top_logprobs[0].logprob <= 0 for token in whole), "as the model has them"
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**common, stream=True)]
    streamed = [token for chunk in chunks if chunk.logprobs for token in chunk.logprobs.content or []]
    assert [token.token for token in streamed] == [token.token for token in whole]
    assert [token.logprob for token in streamed] == pytest.approx([token.logprob for token in whole], abs=1e-3)


def test_prompt_log_probabilities_come_beside_the_text(http: httpx.Client) -> None:
    choice = complete(http, prompt_logprobs=2, max_tokens=1).json()["choices"][0]
    told = choice["prompt_logprobs"]
    assert len(told) == len(PROMPT)
    assert told[0] is None
    assert choice["logprobs"] is None
    for entry, token in zip(told[1:], encode(PROMPT)[1:], strict=True):
        assert str(token) in entry
        assert 2 <= len(entry) <= 3
        assert all(value["logprob"] <= 0 for value in entry.values())


def test_prompt_log_probabilities_are_streamed_with_the_first_chunk(client: openai.OpenAI, http: httpx.Client) -> None:
    common: Any = {"model": MODEL, "max_tokens": 3, "n": 2, "extra_body": {"prompt_logprobs": 1}}
    chunks = [c.model_dump() for c in client.completions.create(**common, prompt=PROMPT, stream=True)]
    told = {c["choices"][0]["index"]: c["choices"][0] for c in reversed(chunks)}
    whole = complete(http, prompt_logprobs=1, max_tokens=1).json()["choices"][0]["prompt_logprobs"]
    for choice in told.values():
        assert [sorted(entry or {}) for entry in choice["prompt_logprobs"]] == [sorted(entry or {}) for entry in whole]
    assert sum("prompt_logprobs" in c["choices"][0] for c in chunks) == len(told) == 2
    messages: Any = [{"role": "user", "content": PROMPT}]
    first, *others = [c.model_dump() for c in client.chat.completions.create(**common, messages=messages, stream=True)]
    assert [entry is None for entry in first["prompt_logprobs"]] == [True] + [False] * (len(PROMPT) - 1)
    assert not any("prompt_logprobs" in chunk for chunk in others)


def test_a_prompt_is_scored_without_drawing_a_token(
    client: openai.OpenAI, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    common: Any = {"model": MODEL, "prompt": PROMPT, "logprobs": 1, "echo": True, "max_tokens": 0}
    answer = client.completions.create(**common)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 0)
    assert choice.logprobs is not None
    told = choice.logprobs.token_logprobs or []
    expected = log_probabilities(folder, PROMPT)
    assert told[0] is None
    for position, token in enumerate(encode(PROMPT)[1:], start=1):
        assert told[position] == pytest.approx(expected[position - 1, token].item(), abs=1e-3)
    (chunk,) = client.completions.create(**common, stream=True)
    assert (chunk.choices[0].text, chunk.choices[0].finish_reason) == (PROMPT, "length")
    assert chunk.choices[0].logprobs is not None
    assert chunk.choices[0].logprobs.token_logprobs == pytest.approx(told, abs=1e-3)


# --- what may be drawn ----------------------------------------------------------------------------------------------


def test_biases_lists_and_bad_words_decide_what_is_drawn(http: httpx.Client) -> None:
    (x,) = encode("x")
    assert text_of(http, logit_bias={str(x): 100}, temperature=0) == "x" * 12
    letters = encode("abc")
    only = text_of(http, allowed_token_ids=letters, max_tokens=60)
    assert set(only) == set("abc")
    without = text_of(http, allowed_token_ids=letters, max_tokens=200, bad_words=["ab", "cc"])
    assert set(without) == set("abc")
    assert "ab" not in without
    assert "cc" not in without


def test_penalties_keep_a_text_from_repeating_itself(http: httpx.Client) -> None:
    letters = encode("abcdefghijkl")
    common: dict[str, Any] = {"allowed_token_ids": letters, "temperature": 0, "max_tokens": len(letters), "prompt": "x"}
    assert len(set(text_of(http, **common))) < len(letters)
    strongest = {"presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 10}
    assert len(set(text_of(http, **common, **strongest))) > len(set(text_of(http, **common)))


def test_ends_come_when_they_may(http: httpx.Client) -> None:
    (stop,) = encode("s")
    certain = {"logit_bias": {str(stop): 100}, "stop_token_ids": [stop], "temperature": 0}
    at_once = complete(http, **certain).json()["choices"][0]
    assert (at_once["text"], at_once["finish_reason"]) == ("", "stop")
    later = complete(http, **certain, min_tokens=5, allowed_token_ids=[stop, *encode("ab")]).json()
    assert later["usage"]["completion_tokens"] == 5
    assert later["choices"][0]["finish_reason"] == "stop"
    endless = complete(http, logit_bias={str(EOS): 100}, temperature=0, ignore_eos=True).json()
    assert endless["usage"]["completion_tokens"] == 12


def test_samples_of_one_request_differ_and_repeat_with_its_seed(http: httpx.Client) -> None:
    first, second = (complete(http, n=4, allowed_token_ids=encode("abcdef")).json()["choices"] for _ in range(2))
    assert [choice["text"] for choice in first] == [choice["text"] for choice in second]
    assert len({choice["text"] for choice in first}) == 4


# --- structured output ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_noise_becomes_json_under_a_schema(client: openai.OpenAI, stream: bool) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "catch", "schema": SCHEMA, "strict": True}}
    common: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 300, "seed": 3, "n": 3}
    answer: Any = client.completions.create(**common, extra_body={"response_format": response_format}, stream=stream)
    texts = ["", "", ""]
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    for text in texts:
        value = json.loads(text)
        assert value["kind"] in ("fish", "shoal")
        assert isinstance(value["big"], bool)


def test_noise_becomes_what_an_expression_or_a_grammar_asks_for(http: httpx.Client) -> None:
    expression = r"(fish|shoal)( [0-9]{2}){3}"
    assert re.fullmatch(expression, text_of(http, guided_regex=expression, max_tokens=40))
    assert re.fullmatch(
        expression, text_of(http, response_format={"type": "regex", "regex": expression}, max_tokens=40)
    )
    rules = 'start: greeting " " name\ngreeting: "hi" | "hello"\nname: /[a-z]{3}/'
    assert re.fullmatch("(hi|hello) [a-z]{3}", text_of(http, guided_grammar=rules, max_tokens=40))
    value = text_of(http, response_format={"type": "json_object"}, max_tokens=400, temperature=0.3, stop=["}"])
    assert value.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("fields", "param", "hint"),
    [
        ({"guided_json": {"type": "strin"}}, "guided_json", "strin"),
        ({"response_format": {"type": "regex", "regex": "a("}}, "response_format", "unclosed"),
        ({"guided_grammar": "start: nowhere"}, "guided_grammar", "nowhere"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "guided_regex"),
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids", str(VOCAB_SIZE)),
        ({"prompt": [VOCAB_SIZE]}, "prompt", str(VOCAB_SIZE)),
        ({"prompt": [-1]}, "prompt", str(VOCAB_SIZE)),
    ],
)
def test_what_cannot_be_is_refused_by_name(http: httpx.Client, fields: dict[str, Any], param: str, hint: str) -> None:
    answer = complete(http, **fields)
    assert answer.status_code == httpx.codes.BAD_REQUEST
    assert answer.json()["error"]["param"] == param
    assert hint in answer.json()["error"]["message"]


# --- odd requests fail alone ----------------------------------------------------------------------------------------


def test_odd_requests_fail_alone_while_others_run_and_the_engine_lives(http: httpx.Client) -> None:
    expected = text_of(http, max_tokens=40, temperature=0, allowed_token_ids=encode("abcdef"))
    pid = http.get("/v1/cluster").json()["ranks"][0]["pid"]
    odd: list[tuple[dict[str, Any], int, str]] = [
        ({"prompt": f"before {POISON} after"}, httpx.codes.INTERNAL_SERVER_ERROR, "not a number"),
        ({"guided_regex": r"[^\s\S]"}, httpx.codes.BAD_REQUEST, "response_format"),
        ({"allowed_token_ids": encode("a"), "bad_words": ["a"]}, httpx.codes.BAD_REQUEST, "allowed_token_ids"),
    ]
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(complete, http, **fields) for fields, _, _ in odd * 2]
        good = [
            threads.submit(text_of, http, max_tokens=40, temperature=0, allowed_token_ids=encode("abcdef"))
            for _ in range(4)
        ]
        answers = [future.result() for future in asked]
        assert [future.result() for future in good] == [expected] * 4
    for answer, (_, status, hint) in zip(answers, odd * 2, strict=True):
        assert answer.status_code == status
        assert hint in answer.json()["error"]["message"]
    (rank,) = http.get("/v1/cluster").json()["ranks"]
    assert rank["pid"] == pid
    assert text_of(http, max_tokens=40, temperature=0, allowed_token_ids=encode("abcdef")) == expected


def test_a_grammar_that_comes_to_nothing_within_a_stream_is_told_as_the_callers_fault(http: httpx.Client) -> None:
    fields = {"guided_regex": "[a-c]{3}x", "bad_words": ["x"], "stream": True, "temperature": 0, "max_tokens": 9}
    lines = [line.removeprefix("data: ") for line in complete(http, **fields).text.splitlines() if line]
    first, *_, last, done = lines
    assert json.loads(first)["choices"][0]["text"] in set("abc")
    assert (json.loads(last)["error"]["type"], done) == ("invalid_request_error", "[DONE]")
    assert "response_format" in json.loads(last)["error"]["message"]
