"""Step-Video-T2V and its turbo variant: text to video. Read next: `spec.py`."""
