"""The sequence table, the scheduler, and the host builders of plans."""
