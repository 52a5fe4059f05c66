"""Claim jobs from the queue, run or resume them, write their files and delete them in time."""
