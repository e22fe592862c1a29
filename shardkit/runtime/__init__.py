"""The engine: what runs during a step."""
