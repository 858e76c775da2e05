"""YAML files: models with their slot layouts, and engine runs."""
