"""Idle engines take part in every step of the last rows (mechanism B6)."""
