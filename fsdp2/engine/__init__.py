"""WHEN things happen: one training step. From the top down; a file imports only what stands below it.

use        a block in which parameters are full, for use outside forward
index      which parameter a tensor belongs to, and what lies below a module
by_hand    gathers that the caller asks for
unit       one fully_shard call: what happens around the forward and backward of its modules
passes     one forward, backward or finalization under one root, and what outlives it there
order      the recorded order of groups, which says what comes next
group      parameters that communicate together: gather, free, show, reduce
reducer    a group's gradients on their way out
buffers    a group's memory
subgroup   pieces kept on few neighbouring ranks after forward
extension  tensors that decide themselves what travels
kept       full parameters that outlive their use
hints      errors about shards that were computed with, explained
param      one managed parameter: shard, full tensor, gradient
observer   what the passes under a root show of themselves
lifecycle  which steps may follow which: two tables
compression  which parameters travel in which block format
options    every knob of a group
casts      what a policy casts
"""
