"""Claim jobs from the queue, run or resume them, write their files, delete expired ones."""
