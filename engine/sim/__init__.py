"""The sim runner: a timing model instead of a model."""
