"""The contract between processes: typed messages, codec, sockets, ids and errors. Needs neither torch nor ray."""
