"""Memory of components, and the memory fallbacks with which they fit their devices."""
