"""Optimizer steps on full parameters, each on the rank that owns it. From the top down.

full_params  what users call, and the steps
lending      what the optimizer sees in a step
full_state   the optimizer state of such steps
early        sends gradients to owners while backward runs
kept         whole parameters that stay with their owners between steps
fingerprint  whether a tensor has the same bits as before
exchange     sends tensors between the holders and the owners of parameters
ownership    what one optimizer steps on, its owners, and the parts that this rank holds
stacks       which parameters are stacks of matrices, each of which is stepped on by itself
owners       balances owners by cost
"""
