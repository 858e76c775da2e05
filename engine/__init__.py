"""The run: slab, step loop, activation sources, traces, reports, verification."""
