"""WHEN things happen: lifecycle, parameters, groups, states, the root and the hooks."""
