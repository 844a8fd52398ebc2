"""Compare ranks, and name those that do something else. An observer of passes, which uses the process group's store.

From the top down; a file imports only files below it.

process     this process in its process group; checkpoints that are saved at the same time
standstill  where this process is, and the log of a rank that waits for long
monitor     compares the collectives of the ranks under one root
start       compares models and options before the first forward
log         the collectives of this rank, and those that all ranks expect
board       meetings of ranks, and errors that all ranks raise
store       keys in any kind of store
"""
