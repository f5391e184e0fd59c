"""Vectors and prompts of embeddings, from OpenAI's client down to a real model in real engine processes."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from tqdm import tqdm

from orchestrator.llm.tokenizer import byte_tokenizer
from tests.integration.serving import deployment as serve
from tests.unit.runner.families import embed, generate, pooled, save_family

MODEL = "tiny"
DEADLINE_S = 60.0
HIDDEN = 64
TEXTS = ["A shoal", "of fish", "A shoal moves as one", "x"]
TOKENS = [list(text.encode()) for text in TEXTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / MODEL
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tqdm, "monitor_interval", 0)
        save_family("llama", folder)
    byte_tokenizer().backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def vectors(folder: Path) -> Any:
    """Return what transformers says of the texts, [num_texts, HIDDEN]."""
    return torch.stack(pooled(folder, TOKENS)).numpy()


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    options = ("--executor", "local", "--device", "cpu", "--dtype", "float32", "--kv-cache-memory", "8MiB")
    ranks = ("--data-parallel-size", "2")
    with serve("--model", str(folder), "--served-model-name", MODEL, *options, *ranks) as served:
        yield served.wait_ready()


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
        yield client


def post(url: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/{path}", json={"model": MODEL} | body, timeout=DEADLINE_S)


def npy(matrix: Any) -> str:
    file = io.BytesIO()
    np.save(file, matrix)
    return base64.b64encode(file.getvalue()).decode()


def embeddings_of(folder: Path) -> list[np.ndarray]:
    return [embeds.numpy() for embeds in embed(folder, TOKENS)]


# --- vectors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", [TEXTS, TOKENS])
def test_vectors_are_those_of_transformers(client: openai.OpenAI, vectors: Any, inputs: Any) -> None:
    answer = client.embeddings.create(model=MODEL, input=inputs)  # the client asks for base64 by itself
    found = np.array([item.embedding for item in answer.data])
    np.testing.assert_allclose(found, vectors, atol=2e-5)
    assert ((found * vectors).sum(axis=1) > 0.9999).all()
    assert [item.index for item in answer.data] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, TOKENS))


@pytest.mark.parametrize("one", [TEXTS[2], TOKENS[2]])
def test_floats_say_what_base64_says(client: openai.OpenAI, vectors: Any, one: Any) -> None:
    (item,) = client.embeddings.create(model=MODEL, input=one, encoding_format="float").data
    np.testing.assert_allclose(item.embedding, vectors[2], atol=2e-5)


def test_fewer_dimensions_are_a_shorter_vector_of_length_one(client: openai.OpenAI, vectors: Any) -> None:
    (item,) = client.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=16).data
    shorter = vectors[0][:16] / np.linalg.norm(vectors[0][:16])
    np.testing.assert_allclose(item.embedding, shorter, atol=2e-5)


def test_many_vectors_come_in_order_from_both_ranks(client: openai.OpenAI, vectors: Any) -> None:
    answer = client.embeddings.create(model=MODEL, input=TEXTS * 100)
    found = np.array([item.embedding for item in answer.data])
    np.testing.assert_allclose(found, np.tile(vectors, (100, 1)), atol=2e-5)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": ["a", "x" * 200]}, "input"),
        ({"input": [[300]]}, "input"),
        ({"input": "a", "dimensions": HIDDEN + 1}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "model": "other"}, "model"),
        ({"input": "a", "data_parallel_rank": 7}, "data_parallel_rank"),
    ],
)
def test_what_cannot_be_served_is_a_clear_refusal(url: str, body: dict[str, Any], param: str) -> None:
    answer = post(url, "embeddings", **body)
    assert answer.status_code == (404 if param == "model" else 400)
    assert answer.json()["error"]["param"] == param


def test_other_methods_are_not_allowed(url: str) -> None:
    answer = httpx.get(f"{url}/v1/embeddings")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


# --- prompts of embeddings ------------------------------------------------------------------------------------------


def test_embeddings_are_answered_as_their_tokens_are(client: openai.OpenAI, folder: Path) -> None:
    expected = generate(folder, TOKENS, 12)
    answer = client.completions.create(
        model=MODEL,
        prompt="",  # the client insists on one
        max_tokens=12,
        temperature=0,
        extra_body={"prompt_embeds": [npy(matrix) for matrix in embeddings_of(folder)], "ignore_eos": True},
    )
    decode = byte_tokenizer().backend.decode
    assert [choice.text for choice in answer.choices] == [
        decode(token_ids).rstrip("\N{REPLACEMENT CHARACTER}") for token_ids in expected
    ]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, TOKENS))


def test_a_stream_of_several_samples_takes_embeddings_too(client: openai.OpenAI, folder: Path) -> None:
    matrix = embeddings_of(folder)[2].astype("f2")
    chunks = client.completions.create(
        model=MODEL, prompt="", n=3, max_tokens=8, stream=True, extra_body={"prompt_embeds": npy(matrix)}
    )
    assert {chunk.choices[0].index for chunk in chunks} == {0, 1, 2}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt_embeds": "AAAA"}, "prompt_embeds", ".npy"),
        ({"prompt_embeds": npy(np.ones((3, HIDDEN + 1), "f4"))}, "prompt_embeds", f"tokens, {HIDDEN}]"),
        ({"prompt_embeds": npy(np.full((3, HIDDEN), np.nan, "f4"))}, "prompt_embeds", "no number"),
        ({"prompt_embeds": npy(np.ones((200, HIDDEN), "f4"))}, "prompt", "200 tokens"),
        ({"prompt_embeds": npy(np.ones((3, HIDDEN), "f4")), "echo": True}, "echo", "no tokens"),
        ({"prompt_embeds": npy(np.ones((3, HIDDEN), "f4")), "prompt_logprobs": 1}, "prompt_logprobs", "no tokens"),
    ],
)
def test_embeddings_that_cannot_be_served_are_a_clear_refusal(
    url: str, body: dict[str, Any], param: str, words: str
) -> None:
    answer = post(url, "completions", **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]


def test_nothing_is_held_at_the_end(url: str) -> None:
    cluster = httpx.get(f"{url}/v1/cluster").json()
    assert cluster["statistics"]["embeds_bytes"] == 0
    assert cluster["statistics"]["pending_messages"] == 0
