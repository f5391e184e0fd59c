"""Load balancing: the load ledger and picks of a client, and the coordinator that publishes loads and group state."""
