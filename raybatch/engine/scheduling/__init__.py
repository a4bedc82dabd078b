"""Decides which sequences run in the next step and which wait."""
