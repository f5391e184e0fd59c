"""The packaged real model, from its GGUF file to text: exported tokenizer in, the text transformers gives out."""

import json
from pathlib import Path

import jinja2
import pytest
import torch
from tokenizers import Tokenizer

from engine.config import ModelConfig, SchedulerConfig
from engine.model.conversion import unpacked_weights
from engine.model.export import export
from engine.model.names import resolve_model
from engine.model.tokenizer_files import ExportSpec
from engine.runner.torch_runner import TorchRunner
from tests.unit.runner.driver import Driver
from tests.unit.runner.families import generate

MODEL = "smollm2-135m"
NUM_TOKENS = 12

pytestmark = pytest.mark.model


def chat_prompt(folder: Path, tokenizer: Tokenizer, question: str) -> list[int]:
    template = jinja2.Environment(autoescape=False).from_string((folder / "chat_template.jinja").read_text())
    messages = [{"role": "user", "content": question}]
    ids: list[int] = tokenizer.encode(
        template.render(messages=messages, add_generation_prompt=True), add_special_tokens=False
    ).ids
    return ids


def test_a_chat_answer_equals_what_transformers_generates() -> None:
    # The user's own cache is used, as in a deployment: converting the file takes half a minute, once.
    folder = Path(export(ExportSpec(model=MODEL)).tokenizer_dir)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = chat_prompt(folder, tokenizer, "What is the capital of France?")
    info = json.loads((folder / "model_info.json").read_text())
    scheduler = SchedulerConfig(kv_cache_memory_bytes=64 << 20)
    runner = TorchRunner(
        ModelConfig(model=MODEL, dtype="float32", max_model_len=1024), scheduler, lambda what, share: None
    )
    assert (info["max_model_len"], info["vocab_size"]) == (8192, 49152)
    assert set(info["eos_token_ids"]) == runner.limits.eos_token_ids == {tokenizer.token_to_id("<|im_end|>")}

    driver = Driver(runner)
    answers = driver.generate([driver.add(prompt), driver.add(prompt[:-3])], NUM_TOKENS, chunk=16)
    weights = unpacked_weights(resolve_model(MODEL), torch.float32, lambda what, share: None)
    assert answers == generate(weights, [prompt, prompt[:-3]], NUM_TOKENS)
    assert "Paris" in tokenizer.decode(answers[0])
