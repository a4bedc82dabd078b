"""Sequences, their blocks, their prefix groups, and the schedule of one step."""
