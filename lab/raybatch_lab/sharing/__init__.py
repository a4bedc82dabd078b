"""Simulates weight-sharing groups and their jobs on a virtual clock."""
