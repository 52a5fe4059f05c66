"""Kernels of our own in plain C, compiled on this machine and called through ctypes.

`library` compiles and loads them, `kernels` calls them on tensors. A caller asks `kernels.takes`
first and computes with plain torch where it says no: another device, another dtype, no compiler.
Which modules use them is decided in `everyframe.fast_paths`.
"""
