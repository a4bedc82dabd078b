"""Replicas that compute feed-forward blocks for each other."""
