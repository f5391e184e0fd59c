"""THE LINE: the MPClient family; sockets to the engines, in-flight table, one output task."""
