"""What bytes and arrays mean: record formats, rings, state slots, plans, configuration."""
