"""Open-Sora 2.0: text, pictures and clips to video, optionally through a first picture.

Read next: `spec.py`.
"""
