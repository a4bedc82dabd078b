"""Records that everybody knows: requests, completions, counts. No Ray, no torch."""
