"""The commit protocol: files alone decide which rows are in the output.

A plan is written once; each commit unit is one part that is created once, never replaced and never
deleted. No decision depends on Ray, torch or a clock.
"""
