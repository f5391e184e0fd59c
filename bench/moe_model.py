"""Random mixture-of-experts models: one whose steps are felt, and one that is next to nothing.

Each token of their tokenizer is a letter or a syllable: a token without a text of its own, like half a character, would
be seen with the next one only, and two steps look like one.
"""

from itertools import islice
from pathlib import Path
from string import ascii_letters
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from engine.model.progress import progress_bars_to

_NUM_TOKENS = 512


def save_moe_model(folder: Path) -> None:
    """Write a checkpoint of 4 layers of 16 experts, 8 of them for each token: 0.7 GB, 30 ms of one core a step."""
    _save(folder, hidden_size=896, num_hidden_layers=4, num_attention_heads=8, num_experts=16, num_experts_per_tok=8)


def save_tiny_moe_model(folder: Path) -> None:
    """Write a checkpoint of 1 layer of 8 experts, 2 of them for each token: several ranks of it share a core."""
    _save(folder, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_experts=8, num_experts_per_tok=2)


def _save(folder: Path, hidden_size: int, **sizes: Any) -> None:
    config = Qwen3MoeConfig(
        vocab_size=_NUM_TOKENS,
        hidden_size=hidden_size,
        intermediate_size=hidden_size,
        moe_intermediate_size=hidden_size,
        num_key_value_heads=sizes["num_attention_heads"] // 2,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **sizes,
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with progress_bars_to(lambda what, share: None, 0.0, 1.0):
        model.save_pretrained(folder)
    letters = [chr(code) for code in range(ord(" "), ord("~") + 1)]
    syllables = (first + second for first in ascii_letters for second in ascii_letters)
    texts = [*letters, *islice(syllables, _NUM_TOKENS - len(letters))]
    tokenizer = Tokenizer(models.BPE(vocab={text: number for number, text in enumerate(texts)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
