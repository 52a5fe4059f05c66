"""ControlNet inpainting of pictures and videos. Read next: `family.py`."""
