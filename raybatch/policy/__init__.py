"""Decisions over plain numbers: what work costs; arrays alone, no Ray, no torch, no clock."""
