"""The text facade over a client: chat templates, tokenizer, incremental detokenising, request streams."""
