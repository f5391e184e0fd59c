"""ONE RANK: wire contract, EngineCore, scheduler, runners."""
