"""Idle engines compute the last rows as well, where their own may be late."""
