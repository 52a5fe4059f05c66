"""Helpers that several tests share: tiny checkpoints, planted faults, groups of ranks, fakes."""
