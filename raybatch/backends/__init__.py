"""What a replica runs: one module per backend, all with the protocol of `base`."""
