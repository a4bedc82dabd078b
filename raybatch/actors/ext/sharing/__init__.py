"""Replicas of one host share weights, and choose how (mechanisms S10, S13)."""
