"""The page boundary: which sequences end, yield, grow, are loaded or prefilled."""
