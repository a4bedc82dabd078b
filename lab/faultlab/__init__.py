"""Faults on purpose: crashes that the commit protocol must survive, and jobs must.

A separate package next to raybatch, in the repository alone:
`pip install -e ./raybatch-extensions -e ./lab`.
"""
