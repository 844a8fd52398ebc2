"""Optimizer steps on full parameters, each on the rank that owns it. From the top down.

full_params  what users call, and the steps
stacks       lets a step take each matrix of a parameter that is a stack of them
full_state   the optimizer state of such steps
exchange     sends tensors between the holders and the owners of parameters
ownership    the parameters of one optimizer, their owners, and the parts that this rank holds
owners       balances owners by cost
"""
