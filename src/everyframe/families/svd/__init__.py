"""Stable Video Diffusion: image to video. Read next: `spec.py`."""
