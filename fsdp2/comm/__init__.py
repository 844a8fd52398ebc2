"""HOW bytes move: lanes, collectives, gathering and reducing."""
