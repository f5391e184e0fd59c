"""EngineCore: the seam between the process and the scheduler, and the native implementation."""
