"""The laboratory of raybatch: simulated pools, what calibrates them, and planted bugs.

A separate package next to raybatch, like `faultlab`, in the repository only:
`pip install -e ./raybatch-extensions -e ./lab`.
"""
