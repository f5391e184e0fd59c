"""Routing: the load ledger of one client and the choice of an engine for a sequence. Pure."""
