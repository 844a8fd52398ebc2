"""WHERE bytes live: integers and placements. From the top down; a file imports only what stands below it.

boxes    parts of tensors: which of them this rank holds, and how blocks fill buckets
spec     how one parameter is cut, as a DTensor
mesh     the axes that parameters are cut over and copied along
packing  how many tensors lie in one buffer
layout   which elements of a tensor each rank holds
"""
