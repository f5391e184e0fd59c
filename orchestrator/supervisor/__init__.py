"""The process behind ``shoal serve``: it starts, watches and stops every other process of a deployment."""
