"""The control channel between the supervisor and the API processes, and the settings that change through it."""
