"""Optimizer steps on shards and on full parameters. From the top down; a file imports only files below it.

full_params  steps on full parameters, each on the rank that owns it
stacks       lets a step take each matrix of a parameter that is a stack of them
full_state   the optimizer state of such steps
exchange     sends tensors between the holders and the owners of parameters
ownership    the parameters of one optimizer, their owners, and the parts that this rank holds
owners       balances owners by cost
local_step   steps on local shards
collecting   collects a group's tensors for a step, as torch's optimizer does
proxies      plain parameters that replace shards during steps of optimizers that are not torch's own
clip         gradient clipping
grad_scaler  gradient scaling with the same decision on every rank
prebuilt     replaces parameters that an optimizer was given before they were sharded
averaging    parameters beside sharded ones whose gradients nobody averages, and those that DDP would average too
unreduced    gradients that are not reduced yet: zeroing drops them, functions that read gradients refuse them
alike        local tensors of gradients and states, which must be sharded like their parameter
runs         operators that read every element of a list of tensors
"""
