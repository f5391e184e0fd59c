"""Limits and special tokens are read wherever a checkpoint may name them."""

from transformers import GenerationConfig, GPT2Config, LlamaConfig

from engine.model.model_info import describe


def test_generation_configuration_adds_its_end_tokens() -> None:
    config = LlamaConfig(vocab_size=100, max_position_embeddings=64, eos_token_id=2)
    generation = GenerationConfig(eos_token_id=[7, 2])  # type: ignore[no-untyped-call]
    info = describe(config, generation)
    assert info.eos_token_ids == (2, 7)
    assert (info.architecture, info.vocab_size, info.max_model_len) == ("LlamaConfig", 100, 64)


def test_other_spellings_and_missing_tokens() -> None:
    info = describe(GPT2Config(vocab_size=50, n_positions=32, eos_token_id=None))
    assert (info.max_model_len, info.eos_token_ids) == (32, ())
