"""Run a call on meta tensors: memory, work and dtype errors without a device or weights."""
