"""State dicts of sharded models and their optimizers: full, sharded or local, by the names of the plain model."""
