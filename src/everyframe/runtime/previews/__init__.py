"""Small pictures of the latents while a run goes on."""
