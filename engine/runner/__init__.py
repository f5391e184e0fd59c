"""The torch runner: one flattened forward per step through a Hugging Face decoder."""
