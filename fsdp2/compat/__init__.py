"""Compatibility with torch's FSDP2. From the top down; a file imports only files below it.

install  replaces torch's fully_shard in libraries that import it
names    torch's names for the parts of a unit, a group and a parameter
"""
