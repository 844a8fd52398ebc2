"""Optimizers: those built before sharding, steps on local shards, gradient clipping."""
