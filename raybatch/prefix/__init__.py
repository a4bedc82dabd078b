"""Planning over the whole dataset before any engine starts; pure functions over numpy arrays."""
