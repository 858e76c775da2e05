"""The operations: a public function each, over CUDA, Numba (CPU) and NumPy (reference) backends."""
