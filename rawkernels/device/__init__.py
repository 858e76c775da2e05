"""What a GPU is asked for: probe, kernel build and cache, modules, streams."""
