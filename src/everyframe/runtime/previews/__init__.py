"""Small pictures of the latents during a run."""
