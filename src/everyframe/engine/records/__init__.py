"""Records: what a video was made from, as data that reproduces it."""
