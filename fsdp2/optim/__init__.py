"""What optimizers need. From the top down; a file imports only files below it.

offload      state on the host, steps on the device
whole        steps on full parameters, each on the rank that owns it
local        steps on local shards

What every model needs:

clip         gradient clipping
grad_scaler  gradient scaling with the same decision on every rank
prebuilt     replaces parameters that an optimizer was given before they were sharded
host_state   the state of an optimizer in memory of the host
partial      steps that go over some parameters at a time
averaging    parameters beside sharded ones whose gradients nobody averages, and those that DDP would average too
unseen       gradients that are not on shards yet: zeroing drops them, functions that read gradients refuse them
copies       copies of gradients, which are scaled with them
alike        local tensors of gradients and states, which must be sharded like their parameter
leaves       the leaves of optimizer states
runs         operators that read every element of a list of tensors
"""
