"""Stages that families share: encode, denoise and decode, under the guard, in pieces and tiles."""
