"""Kernels of our own in plain C, compiled on this machine and called through ctypes.

`library` compiles and loads them, `kernels` calls them on tensors. A caller checks
`kernels.supports` first and falls back to plain torch: for another device or dtype, or without a
compiler. `everyframe.fast_paths` decides which modules use them.
"""
