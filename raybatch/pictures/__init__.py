"""What people look at: numbers in words, text for a terminal, SVG, and self-contained HTML pages.

Everything that comes from a dataset is escaped here. Nothing is computed but coordinates.
"""
