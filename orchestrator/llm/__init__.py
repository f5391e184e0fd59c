"""The text facade between the HTTP API and the client: templates, tokenizer, detokenising, request streams."""
