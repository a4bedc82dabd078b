"""Optional mechanisms: weights that replicas share, TP groups, copies of the last rows."""
