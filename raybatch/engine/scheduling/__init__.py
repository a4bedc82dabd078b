"""Which sequences are in the next step, and which wait."""
