"""Any diffusers video pipeline, run through its own `__call__`."""
