"""Optional mechanisms of engines and pools: weights that replicas share, and TP groups."""
