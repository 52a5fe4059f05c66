"""Media files: read and write mp4, gif, webp, png and png folders, with their provenance record.

This package imports nothing, so a command's help loads neither numpy, Pillow nor FFmpeg. Import
from the modules: `output_path` (endings, checks before a run, default names), `write` and `video`
(writing), `read` (pictures and videos), `record` (provenance), `pixels` (8-bit conversion and
resizing). Read next: `everyframe.media.write`.
"""
