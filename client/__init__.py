"""The clients of engines: the MPClient family with its sockets, in-flight table and output task."""
