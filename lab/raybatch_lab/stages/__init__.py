"""Replicas that each run sequences of one range of lengths: when they pay, which, who runs what."""
