"""The base of the HTTP API: errors, ASGI messages, waiting for states."""
