"""Optimizers: from the top down; a file imports only what stands below it.

full_params  steps on full parameters, each by its owner
full_state   the state of such steps
exchange     what travels between holders and owners of parameters
ownership    the parameters of one optimizer, their owners, and what this rank holds of them
owners       owners balanced by cost
local_step   steps on local shards
collecting   a group's tensors for a step, as torch's optimizer collects them
proxies      plain parameters that stand for shards in optimizers that are not torch's own
clip         gradient clipping
grad_scaler  gradient scaling, and one verdict for all ranks
prebuilt     optimizers that hold other tensors than the shards
alike        shards and states that are cut the same way
runs         lists of tensors regrouped for operators that read every element
"""
