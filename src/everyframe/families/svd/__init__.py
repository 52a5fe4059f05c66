"""Stable Video Diffusion: a picture becomes a video. Read next: `family.py`."""
