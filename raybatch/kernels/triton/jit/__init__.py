"""The bodies of the Triton kernels: pointers, strides and masks; no allocation, no choice of tiles.

Addresses are int64 wherever rows or cache blocks enter them. Tiles are powers of two; lanes past
the end of a dimension are masked. Sums are float32 whatever the dtype of the tensors; products of
float32 take three passes of tensor cores, which keeps its precision.
"""
