"""The OpenAI-compatible HTTP API, in a process of its own; see the README beside this file."""
