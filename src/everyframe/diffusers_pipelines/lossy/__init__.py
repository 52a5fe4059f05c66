"""Lossy methods around a pipeline's denoisers: predicted answers and shallow UNets."""
