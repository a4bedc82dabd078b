"""Model folders: location, config.json, and checkpoint headers."""
