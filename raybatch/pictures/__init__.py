"""Output for people: formatted numbers, text for a terminal, SVG, and self-contained HTML pages.

Everything that comes from a dataset is escaped here. Only coordinates are computed.
"""
