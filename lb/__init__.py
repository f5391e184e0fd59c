"""WHO GETS IT: load ledger, picks, and the coordinator that publishes loads and group state."""
