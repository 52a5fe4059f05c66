"""Tiny random checkpoints in upstream's layouts: one module per family, and diffusers' own."""
