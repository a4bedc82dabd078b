"""The ops of `raybatch.kernels` as Triton kernels; imported only on a GPU.

Every op has the name and signature of its reference. Kernels are in `jit`, launch code is here.
Tensors are on the current CUDA device. With TRITON_INTERPRET=1, set before triton is imported, the
same code runs slowly on CPU tensors, for tests only.
"""
