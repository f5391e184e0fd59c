"""Real mixture-of-experts models on lockstep ranks say what one process of transformers says, whatever happens."""

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import MixtralConfig, OlmoeConfig, Qwen3MoeConfig

from tests.chaos.rounds import kill_engine, run_rounds
from tests.chaos.streams import differences_within_margin, mixed_asks
from tests.integration.lockstep import group, kill, pids, wait_whole
from tests.integration.scaling import scale
from tests.integration.serving import Deployment, deployment, eventually, run_shoal
from tests.unit.runner.byte_tokenizer import VOCAB_SIZE, byte_tokenizer, encode, save_byte_tokenizer
from tests.unit.runner.families import generate, save_model

NUM_PROMPTS, MAX_TOKENS = 16, 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
}
MODELS: dict[str, Callable[[], Any]] = {
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, moe_intermediate_size=48, num_experts=8),
    "mixtral": lambda: MixtralConfig(**SIZES, head_dim=16, num_local_experts=8),
    "olmoe": lambda: OlmoeConfig(**SIZES, num_experts=8),
}
PROMPTS = [f"{number} fish swim in {'one school and ' * (number % 4)}the sea" for number in range(NUM_PROMPTS)]


def serve_arguments(folder: Path, num_ranks: int, executor: str = "local") -> list[str]:
    return [
        *("--model", str(folder), "--served-model-name", "sim", "--executor", executor, "--enable-expert-parallel"),
        *("--dtype", "float32", "--device", "cpu", "--kv-cache-memory", "16MiB", "--max-restarts", "100"),
        *("--data-parallel-size", str(num_ranks)),
    ]


def save(model: str, folder: Path) -> Path:
    save_model(MODELS[model](), folder)
    save_byte_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("qwen3_moe", tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    """Return what transformers alone says to the prompts."""
    return reference(folder)


@pytest.fixture
def served(folder: Path) -> Iterator[Deployment]:
    with deployment(*serve_arguments(folder, 2)) as running:
        running.wait_ready()
        yield running


def reference(folder: Path) -> list[str]:
    answers = generate(folder, [encode(prompt) for prompt in PROMPTS], MAX_TOKENS)
    return [_whole_characters(byte_tokenizer().decode(tokens)) for tokens in answers]


async def complete_all(url: str) -> list[str]:
    """Return what the deployment says to the prompts, asked at once."""

    async def complete(client: httpx.AsyncClient, prompt: str) -> str:
        body = {"model": "sim", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        answer = await client.post("/v1/completions", json=body)
        answer.raise_for_status()
        return _whole_characters(str(answer.json()["choices"][0]["text"]))

    async with httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False) as client:
        return await asyncio.gather(*(complete(client, prompt) for prompt in PROMPTS))


def assert_says(url: str, expected: Sequence[str]) -> None:
    assert asyncio.run(complete_all(url)) == list(expected)


def test_killed_placed_anew_and_scaled_in_sleep_a_group_answers_as_one_process(
    served: Deployment, expected: list[str]
) -> None:
    """One deployment, because it is dear: served, re-placed, killed, healed, scaled in sleep."""
    url = served.wait_ready()
    wait_whole(url, 2)
    assert_says(url, expected)

    before = group(url)
    assert sorted(expert for held in before["experts"].values() for expert in held) == list(range(8))
    answer = run_shoal("rebalance", "--url", url)
    assert answer.returncode == 0, answer.stderr
    after = group(url)
    assert after["epoch"] > before["epoch"]
    assert after["experts"] != before["experts"]
    assert after["load_imbalance"] < before["load_imbalance"]
    assert_says(url, expected)

    async def kill_under_load() -> list[str]:
        answers = asyncio.create_task(complete_all(url))
        await asyncio.to_thread(eventually, lambda: _num_running(url) > NUM_PROMPTS // 2)
        kill((await asyncio.to_thread(pids, url))[0])
        return await answers

    assert asyncio.run(kill_under_load()) == expected
    wait_whole(url, 2)
    assert_says(url, expected)

    with httpx.Client(base_url=url, timeout=60.0, trust_env=False) as http:
        http.post("/sleep?level=1").raise_for_status()
        scale(http, size=3)
        http.post("/wake_up").raise_for_status()
        assert_says(url, expected)
        scale(http, remove=[0], drain_timeout=0.0)
    assert_says(url, expected)
    assert served.has_logged("has ended: exit status 0"), "a group that is closed meanwhile does not abort a leaver"
    served.send_signal(signal.SIGTERM)
    assert served.wait_exit() == 0, served.stderr


def _num_running(url: str) -> int:
    return int(sum(row["num_running"] for row in httpx.get(f"{url}/load", timeout=30.0).json()["ranks"]))


def _whole_characters(text: str) -> str:
    """Return a text without what its last bytes may yet become."""
    return text.rstrip("\ufffd")


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_every_family_says_the_same_on_any_number_of_ranks(model: str, num_ranks: int, tmp_path: Path) -> None:
    with deployment(*serve_arguments(save(model, tmp_path), num_ranks)) as served:
        url = served.wait_ready()
        wait_whole(url, num_ranks)
        assert_says(url, reference(tmp_path))


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", [1, 2])
def test_twenty_kills_of_one_of_four_ranks_cost_no_stream_anything(model: str, seed: int, tmp_path: Path) -> None:
    asks = mixed_asks(32, 60, extra=[{"temperature": 0, "logprobs": True, "top_logprobs": 2}])
    with deployment(*serve_arguments(save(model, tmp_path), 4)) as served:
        wait_whole(served.wait_ready(), 4)
        run_rounds(served, asks, [kill_engine] * 10, seed=seed, compare=differences_within_margin)
        wait_whole(served.wait_ready(), 4)
