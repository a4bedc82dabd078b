"""Faults on purpose: schedules of crashes that the commit protocol must survive.

Needs greenlet: `pip install raybatch[faults]`.
"""
