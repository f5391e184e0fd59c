"""The packaged real model, from its GGUF file to text: exported tokenizer, and the tokens of transformers."""

import json
from pathlib import Path

import jinja2
import pytest
import torch
from tokenizers import Tokenizer

from engine.config.engine_config import ModelConfig, SchedulerConfig
from engine.model.export import export
from engine.model.loader import unpacked_weights
from engine.model.names import resolve_model
from engine.model.tokenizer_files import ExportSpec
from engine.runner.torch_runner import TorchRunner
from tests.integration.exactness import answer, assert_equal
from tests.unit.runner.families import generate

MODEL = "smollm2-135m"
NUM_TOKENS = 10
QUESTIONS = (
    "What is the capital of France?",
    "What is the capital of Japan?",
    "Who wrote Hamlet?",
    "Name three primary colours.",
    "How many legs does a spider have?",
    "What is 7 plus 5?",
    "Translate 'good morning' into Spanish.",
    "Write a haiku about the sea.",
    "Why is the sky blue?",
    "What do bees make?",
    "Give me a synonym for happy.",
    "What is the boiling point of water in Celsius?",
    "Explain gravity to a child in one sentence.",
    "Which planet is the largest?",
    "Write a Python function that adds two numbers.",
    "What is the opposite of cold?",
    "List two uses of a paper clip.",
    "Who painted the Mona Lisa?",
    "What language do they speak in Brazil?",
    "Tell me a very short story about a lighthouse keeper who finds a message in a bottle and answers it.",
)

pytestmark = pytest.mark.model


def chat_prompt(folder: Path, tokenizer: Tokenizer, question: str) -> list[int]:
    template = jinja2.Environment(autoescape=False).from_string((folder / "chat_template.jinja").read_text())
    messages = [{"role": "user", "content": question}]
    ids: list[int] = tokenizer.encode(
        template.render(messages=messages, add_generation_prompt=True), add_special_tokens=False
    ).ids
    return ids


def test_chat_answers_equal_what_transformers_generates() -> None:
    # The user's own cache is used, as in a deployment: converting the file takes half a minute, once.
    folder = Path(export(ExportSpec(model=MODEL)).tokenizer_dir)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    info = json.loads((folder / "model_info.json").read_text())
    assert (info["max_model_len"], info["vocab_size"]) == (8192, 49152)

    scheduler = SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=128, kv_cache_memory_bytes=64 << 20)
    config = ModelConfig(model=MODEL, dtype="float32", max_model_len=1024)
    runner = TorchRunner(config, scheduler, lambda what, share: None)
    assert set(info["eos_token_ids"]) == runner.limits.eos_token_ids == {tokenizer.token_to_id("<|im_end|>")}

    prompts = [chat_prompt(folder, tokenizer, question) for question in QUESTIONS]
    answers = answer(runner, scheduler, prompts, NUM_TOKENS, seed=5)
    assert answers.load.num_prefix_hit_tokens > 0, "all chats begin with the same system prompt"
    weights = unpacked_weights(resolve_model(MODEL), torch.float32, lambda what, share: None)
    assert_equal(answers.tokens, generate(weights, prompts, NUM_TOKENS), prompts, weights)
    assert "Paris" in tokenizer.decode(answers.tokens[0])
