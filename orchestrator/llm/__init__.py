"""Where text meets token ids: templates, tokenizer, incremental detokenising, request streams."""
