"""State dicts, full and sharded."""
