"""GPU kernels, each beside the plain torch that specifies it; a leaf that knows tensors and nothing else of ours.

Only the kernel files import triton, so import one where a CUDA device, and with it triton, is known to be there.
"""
