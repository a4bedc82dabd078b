"""Builds the forward batch of a step, with its index tensors, from the schedule."""
