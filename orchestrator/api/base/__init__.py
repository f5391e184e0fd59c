"""What every part of the HTTP API uses: errors, ASGI messages, waiting for states."""
