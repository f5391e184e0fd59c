"""THE SERVICE: command line, configuration, HTTP API, text facade, placement and supervision."""
