"""A model folder: where it lies, its config.json, the headers of its checkpoint."""
