"""Kernels for the CPU: what computes a model few rows at a time."""
