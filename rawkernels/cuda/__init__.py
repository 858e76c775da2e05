"""CUDA kernels and their launchers."""
