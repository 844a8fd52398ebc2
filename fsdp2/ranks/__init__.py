"""Ranks that part ways are named: an observer of passes that compares them through the process group's store.

From the top down; a file imports only what stands below it.

process  this process among those of its process group; checkpoints that it saves meanwhile
monitor  the ranks under one root agree on what they communicate
start    the comparison before the first forward
steps    the steps of this rank, and those that all ranks know
board    where ranks write to each other
store    the keys they write to, in any kind of store
"""
