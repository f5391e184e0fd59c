"""Child processes: how one is started, watched, restarted and ended."""
