"""The process around an EngineCore: input thread, output thread, busy loop, last words."""
