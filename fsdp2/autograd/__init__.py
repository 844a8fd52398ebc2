"""Torch's hooks and autograd graph. From the top down; a file imports only files below it.

side_outputs  finds tensors that a forward leaves as attributes of its modules
hooks         registers all hooks: on modules, nodes, tensors and optimizers
hidden        inputs that no hook can be put on
reach         tests if a backward through a module leads to certain tensors
nesting       counts calls of a module inside a call of itself
trees         finds and replaces tensors inside the inputs and outputs of forward
"""
