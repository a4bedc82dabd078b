"""Weights: prepared files, memory layouts, and buffer pools for streamed layers."""
