"""WHEN things happen: one iteration. From the top down; a file imports only what stands below it.

use        a block in which parameters are full, for use outside forward
index      which parameter a tensor belongs to, and what lies below a module
by_hand    gathers that the caller asks for
unit       one fully_shard call: what happens around the forward and backward of its modules
root       the root of a tree of units: what they share, and what outlives a pass
backward   a backward pass
forward    a forward pass
passes     what both have in common: collectives before an observer
joining    units that some ranks skip: what a pass launches for other ranks
pending    what forwards leave for backwards
itinerary  which groups the passes under a root use, in which order
group      parameters that communicate together, and what happens to them around a forward and a backward
residency  what of a group is in memory, what its modules show, and every move between
gradients  a group's gradients on their way out
unreduced  gradients that backwards have left to a later reduction
gradient_plan  which of them leave together, in which dtypes and layout
observer   sees each collective of a pass before it starts
agreement  what ranks agree on if some of them may skip units
collective  the collectives of a pass, and the kinds of passes
apart      full parameters while Dynamo compiles
buffers    a group's memory
subgroup   pieces kept on few neighbouring ranks after forward
portions   pieces for the shard axis, with shard_over_replicas
extension  tensors that decide themselves what travels
stamp      whether the shards are still those that something was made of
param      one managed parameter: shard, full tensor, gradient
gradient_hooks  users' hooks on the gradients of shards
phase      where a group is in the iteration, and which phase may follow which
formats    in which formats a parameter and its gradient are sent
options    every knob of a group
casts      what a policy casts
registry   objects that are alive, for all threads
"""
