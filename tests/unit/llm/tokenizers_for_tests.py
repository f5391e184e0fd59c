"""Small real tokenizers of the two common kinds, built at run time."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from orchestrator.llm.tokenizer import TextTokenizer

_CORPUS = ["the fish swim in a shoal", "the shoal moves as one fish", "日本語 the 🐟 fish, naïve café 👩‍👩‍👧"] * 4


def byte_level_bpe() -> TextTokenizer:
    """Return a GPT-2 style tokenizer with some merges: characters may be cut anywhere between their bytes."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>"]
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return TextTokenizer(backend, None)


def sentencepiece_like() -> TextTokenizer:
    """Return a Llama-2 style tokenizer: spaces live in the tokens, unknown characters fall back to bytes."""
    vocabulary = {"<unk>": 0, "<s>": 1} | {f"<0x{byte:02X}>": byte + 2 for byte in range(256)}
    for piece in ("▁", "a", "b", "c", "▁a", "▁b", "ab", "▁ab"):
        vocabulary.setdefault(piece, len(vocabulary))
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>"])
    return TextTokenizer(backend, None)
