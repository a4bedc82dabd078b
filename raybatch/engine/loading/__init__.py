"""Loads a model for a config and a device: memory budgets, weights, CUDA graphs."""
