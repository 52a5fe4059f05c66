"""Compile blocks, store them as packages, and load only what this device compiled itself."""
