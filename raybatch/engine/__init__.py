"""The PyTorch engine: sequences, paged KV, scheduler, models, weights. No Ray in here."""
