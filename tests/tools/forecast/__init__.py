"""Forecasts: what they predict against what runs."""
