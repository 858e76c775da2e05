"""NumPy float64 references that read like the definitions."""
