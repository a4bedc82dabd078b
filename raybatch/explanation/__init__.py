"""Explanations: forecast savings, run time and cost of a plan, and compare them with a run."""
