"""Decisions about a pool as a whole, over numbers."""
