"""The command ``shoal``."""
