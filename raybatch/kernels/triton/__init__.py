"""The ops of `raybatch.kernels` as Triton kernels; imported only where a GPU asks for them.

Every op has the name and the signature of its reference. Kernels are in `jit`, what launches them
beside it. Tensors are on one CUDA device, which is the current one. Under TRITON_INTERPRET=1, set
before triton is imported, the same code runs on CPU tensors, slowly and for tests alone.
"""
