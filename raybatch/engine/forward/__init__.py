"""The forward pass: decoder, sequence coroutines, CUDA graphs and the choice of ops."""
