"""Triton kernels of small index work and KV writes, for CUDA devices. Imported by name, where triton is there."""
