"""Whole values into and out of shards. From the top down; a file imports only what stands below it.

state_dict   full, sharded and local state dicts of models and optimizers
load         values put into places: from files, or from the first rank
save         safetensors files, written as blocks arrive
sync         copies made equal to what the first rank holds
summon       full parameters shown for the length of a block
export       every parameter in full, one after the other
matching     which value goes where, and every disagreement about that
materialize  memory for tensors on the meta device
whole        the gather outside a step
transfer     blocks from the ranks that hold them to those that want them, in bounded memory
select       the tensors of a module: names, groups, boxes, and the ranks that they are spread over
safetensors  the files' format
temporary    a folder for files that are not complete yet
ranks        ranks that act together: the first of them, what it shares, whether all can go on
progress     how far a load or save is
names        names of the plain model
"""
