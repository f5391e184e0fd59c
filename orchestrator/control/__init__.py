"""The control channel: what API processes ask of the supervisor, and what it asks of all of them."""
