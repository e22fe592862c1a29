"""Other libraries' interfaces, translated into calls of shardkit. Nothing here is imported unless it is asked for."""
