"""Ranks that part ways are named: an observer of passes that compares them through the process group's store."""
