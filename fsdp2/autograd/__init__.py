"""Torch's hooks and autograd graph. From the top down; a file imports only files below it.

boundary      what goes into a call, and the ways by which its results leave it
side_outputs  finds tensors that a forward leaves as attributes of its modules
hooks         registers all hooks: on modules, nodes, tensors and optimizers
nesting       counts calls of a module inside a call of itself
trees         the one walk over the arguments and results of a forward
"""
