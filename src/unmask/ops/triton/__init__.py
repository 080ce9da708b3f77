"""Triton kernels of the operations. Import them through `unmask.ops`."""
