"""The sim runner: seeded tokens and a timing model instead of a model."""
