"""Faults on purpose: crashes that the commit protocol must survive, and jobs must.

A package of its own beside raybatch, in the repository alone: `pip install -e ./lab`.
"""
