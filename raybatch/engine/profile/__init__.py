"""What a step costs here: measured layers and modules, kept for the next start."""
