"""Frames to files and back: mp4, gif, webp, png, folders of png, and the record of what made them.

Nothing is imported here, so that a command's help need not load numpy, Pillow or FFmpeg. Take names
from the modules: `paths` (endings, checks before a run, names), `write` and `video` (writing),
`read` (pictures and videos), `record` (provenance), `pixels` (numbers to 8-bit colours, fitting).
Read next: `everyframe.media.write`.
"""
