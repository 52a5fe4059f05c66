"""Worker processes: start one per rank, send it jobs, watch it, and say why it ended."""
