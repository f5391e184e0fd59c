"""Weights and tokenizers: names people type, files on disk, the library that loads them."""
