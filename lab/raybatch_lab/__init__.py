"""The laboratory of raybatch: simulated pools, what calibrates them, and planted bugs.

A package of its own beside raybatch, as `faultlab` is, in the repository alone:
`pip install -e ./lab`.
"""
