"""Decisions over plain numbers: what work costs, who has which pages; no Ray, torch or clock."""
