"""A tokenizer of 3 special tokens and one token per byte, as the file a checkpoint has."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PAD, BOS, EOS = 0, 1, 2
NUM_SPECIAL = 3
VOCAB_SIZE = 256 + NUM_SPECIAL


def byte_tokenizer() -> Tokenizer:
    """Return it: byte b is token b + 3."""
    alphabet = _alphabet()
    vocabulary = {"<pad>": PAD, "<s>": BOS, "</s>": EOS} | {alphabet[b]: b + NUM_SPECIAL for b in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<pad>", "<s>", "</s>")])
    return tokenizer


def save_byte_tokenizer(folder: Path) -> None:
    """Write ``tokenizer.json``."""
    byte_tokenizer().save(str(folder / "tokenizer.json"))


def encode(text: str) -> list[int]:
    return [byte + NUM_SPECIAL for byte in text.encode()]


def decode(token_ids: list[int]) -> str:
    return bytes(token - NUM_SPECIAL for token in token_ids if token >= NUM_SPECIAL).decode()


def _alphabet() -> list[str]:
    """Return the printable stand-in of each byte, as GPT-2's byte-level BPE defined it."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(substitutes)) for byte in range(256)]
