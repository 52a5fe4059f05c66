"""ControlNet inpainting of images and videos. Read next: `spec.py`."""
