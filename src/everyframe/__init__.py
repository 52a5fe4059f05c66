"""Everyframe: video diffusion that comes out right on every device, then fast."""

__version__ = "0.1.0"
