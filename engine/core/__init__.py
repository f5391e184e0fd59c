"""The native core of an engine: validation, scheduler and runner behind the ``EngineCore`` protocol."""
