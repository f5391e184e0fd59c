"""The wire contract: typed messages, codec, socket factory, ids and errors. Needs neither torch nor ray."""
