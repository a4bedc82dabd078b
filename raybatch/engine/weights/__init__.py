"""Weights: how they lie in files, in memory, and in buffers that layers take in turns."""
