"""CPU kernels in C, compiled on the host that runs them if it has a compiler."""
