"""Speculative tokens: proposed, verified, and how many of them pay."""
