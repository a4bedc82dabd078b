"""Planning over the prompts of a whole dataset: arrays in, arrays out. No Ray, no torch.

Shape letters: T tokens, R rows, K whole blocks of all rows, B block size, N tree nodes, G groups.
"""
