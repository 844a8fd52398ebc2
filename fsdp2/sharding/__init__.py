"""WHERE bytes live: integers and placements. From the top down; a file imports only files below it.

boxes     boxes of tensors: the box that this rank holds
spec      the sharding of one parameter, and its DTensors
mesh      the axes that parameters are sharded over and replicated along
packing   the places of several tensors in one buffer
layout    the elements of a tensor that each rank holds
platform  what devices and process groups count as
"""
