"""Pictures of what the commands find: layouts, budgets and timelines as SVG, reports by matplotlib.
Nothing here runs or measures; a command hands over what it has."""
