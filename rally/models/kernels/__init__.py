"""Triton kernels, and the plain torch functions that specify them (reference.py). They import nothing else of Rally.

Only the kernel modules import triton; import them only where a CUDA device, and with it triton, is present.
"""
