"""The process around an engine core: input thread, output thread, busy loop."""
