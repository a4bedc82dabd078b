"""Measured times of layers and ops on this host, cached on disk."""
