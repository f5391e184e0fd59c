"""Process life of an API process: its spec, its HTTP server on the shared socket, start, drain and close."""
