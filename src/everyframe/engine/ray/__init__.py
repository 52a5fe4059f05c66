"""An executor on a Ray cluster: its jobs, their ranks, and the files that travel."""
