"""Step-Video-T2V and its turbo variant. Read next: `family.py`."""
