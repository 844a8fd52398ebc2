"""Compare ranks, and name those that deviate: an observer of passes, which uses the process group's store.

From the top down; a file imports only files below it.

process     this process in its process group; checkpoints that are saved at the same time
standstill  where this process is, and what a rank logs if it waits for a long time
monitor     compares the collectives of the ranks under one root
agreement   what all ranks launch next, if some of them may skip units
history     the passes of one root as other ranks compare them
words       collectives in words, and the error if ranks differ
start       compares models and options before the first forward
log         the collectives of this rank, and those that all ranks expect
board       meetings of ranks, and errors that all ranks raise
store       keys in any kind of store
"""
