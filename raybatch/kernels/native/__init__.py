"""Kernels in C for a CPU, compiled on the host that runs them where that has a compiler."""
