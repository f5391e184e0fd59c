"""Small random decoders of many families, saved the way a checkpoint is, so that the real loading path runs."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from engine.model.progress import progress_bars_to

VOCAB_SIZE = 199
MAX_POSITIONS = 128

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.25,  # the usual 0.02 gives nearly equal logits, and ties decide
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "mistral_sliding": lambda: MistralConfig(**_SIZES, head_dim=16, sliding_window=9),
    "qwen2": lambda: Qwen2Config(**_SIZES),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=32),
    "gemma2_softcap": lambda: Gemma2Config(
        **_SIZES,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=9,
        attn_logit_softcapping=4.0,
        tie_word_embeddings=False,
    ),
    "gemma3_sliding": lambda: Gemma3TextConfig(
        **_SIZES,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"],
        tie_word_embeddings=False,
    ),
    "phi3": lambda: Phi3Config(**_SIZES),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=64, n_layer=2, n_head=4, n_positions=MAX_POSITIONS, initializer_range=0.25
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**{k: v for k, v in _SIZES.items() if k != "num_key_value_heads"}),
    "mixtral": lambda: MixtralConfig(**_SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_SIZES, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2),
    "olmoe": lambda: OlmoeConfig(**_SIZES, num_experts=4, num_experts_per_tok=2),
    "gpt_oss_sinks": lambda: GptOssConfig(
        **_SIZES,
        head_dim=16,
        sliding_window=9,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
    ),
}


def without_bars() -> AbstractContextManager[None]:
    """Draw no progress bars; their watcher thread would count as a leak of the test that draws the first."""
    return progress_bars_to(lambda what, share: None, 0, 1)


def save_family(family: str, folder: Path) -> None:
    save_model(FAMILIES[family](), folder)


def save_model(config: Any, folder: Path) -> None:
    torch.manual_seed(7)
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with without_bars():
        model.save_pretrained(folder)


def poison_embedding(folder: Path, token: int) -> None:
    """Give a token an embedding that is not a number, so that whoever reads it has no valid logits."""
    with without_bars():
        model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    with torch.no_grad():
        model.model.embed_tokens.weight[token] = torch.nan
    with without_bars():
        model.save_pretrained(folder)


def load(folder: Path) -> Any:
    """Return the model as transformers runs it: float32, eager attention."""
    with without_bars():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def embed(folder: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Return the model's own embeddings [num_tokens, hidden_size] of each prompt."""
    embeddings = load(folder).get_input_embeddings()
    with torch.inference_mode():
        return [embeddings(torch.tensor(prompt)) for prompt in prompts]


def generate_from_embeds(folder: Path, embeds: list[torch.Tensor], num_tokens: int) -> list[list[int]]:
    """Return what transformers itself answers to embeddings."""
    model = load(folder)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return [
        model.generate(
            inputs_embeds=prompt[None],
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
        )[0].tolist()
        for prompt in embeds
    ]


def pooled(folder: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Return the final hidden state [hidden_size] of the last token of each prompt, of length 1."""
    model = load(folder)
    with torch.inference_mode():
        states = [model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1] for ids in prompts]
    return [torch.nn.functional.normalize(state, dim=0) for state in states]


def generate(folder: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Return what transformers itself answers: eager attention, its own cache, prompts of one length at a time."""
    model = load(folder)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    outputs: dict[int, list[int]] = {}
    for length in sorted(set(map(len, prompts))):
        indices = [index for index, prompt in enumerate(prompts) if len(prompt) == length]
        ids = torch.tensor([prompts[index] for index in indices])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
        )
        outputs |= dict(zip(indices, output[:, length:].tolist(), strict=True))
    return [outputs[index] for index in range(len(prompts))]
