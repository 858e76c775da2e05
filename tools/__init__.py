"""Command line, kernel report, checks, benchmarks, pictures."""
