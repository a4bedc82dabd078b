"""The bodies of the Triton kernels: pointers, strides and masks, without allocation or tile sizes.

Addresses with rows or cache blocks are int64. Tiles are powers of two; lanes beyond a dimension are
masked. Sums are float32 for all dtypes; float32 products use three passes of tensor cores (3xTF32),
which keeps the precision.
"""
