"""Turns rows into requests, and completions into output columns."""
