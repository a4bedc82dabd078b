"""The commit protocol: which rows are in the output, decided by files alone.

A plan is written once; each unit of it is one part that is created and never replaced; nothing is
deleted. No Ray, no torch, and no clock in any decision.
"""
