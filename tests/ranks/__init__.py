"""Ranks that part ways, die or come with something else: real processes that may hang, crash or be killed."""
