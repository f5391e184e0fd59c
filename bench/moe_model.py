"""A random mixture-of-experts model whose single step takes some 25 ms of one core, with a tokenizer of bytes."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from engine.model.progress import progress_bars_to

_NUM_TOKENS = 512


def save_moe_model(folder: Path) -> None:
    """Write it as a checkpoint: 4 layers of 16 experts, 8 of them for each token; 0.5 GB."""
    config = Qwen3MoeConfig(
        vocab_size=_NUM_TOKENS,
        hidden_size=768,
        intermediate_size=768,
        moe_intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_experts=16,
        num_experts_per_tok=8,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with progress_bars_to(lambda what, share: None, 0.0, 1.0):
        model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
