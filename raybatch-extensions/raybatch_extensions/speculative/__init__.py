"""Speculative execution: idle engines also run the last rows, if theirs may be late."""
