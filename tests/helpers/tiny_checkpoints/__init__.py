"""Tiny random checkpoints in their authors' layouts: a module a family, and diffusers' own."""
