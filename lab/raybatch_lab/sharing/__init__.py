"""Rows, groups and jobs of replicas that share weights, on a virtual clock."""
