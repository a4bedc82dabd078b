"""Bugs that are planted one at a time, to see which test finds each."""
