"""Tensor-parallel (TP) groups of engines: weight slices, KV moves and joint steps."""
