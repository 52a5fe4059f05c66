"""Open-Sora 1.0 and 1.2: text to video and image to video. Read next: `spec.py`."""
