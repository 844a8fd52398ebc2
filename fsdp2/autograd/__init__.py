"""Torch's hooks and autograd graph. From the top down; a file imports only files below it.

side_outputs  finds tensors that a forward leaves as attributes of its modules
reach         tests if a backward through a module leads to certain tensors
hooks         registers all hooks: on modules, nodes, tensors and optimizers
nesting       counts calls of a module inside a call of itself
trees         finds and replaces tensors inside the inputs and outputs of forward
"""
