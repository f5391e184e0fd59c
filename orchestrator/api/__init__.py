"""The OpenAI-compatible HTTP API in its own process."""
