"""What is asked of torch's hooks and graph. From the top down; a file imports only what stands below it.

side_outputs  tensors that leave a forward as attributes of its modules
reach         whether a backward through a module leads to certain tensors
hooks         every hook that is registered: on modules, nodes, tensors and optimizers
nesting       calls of a module inside a call of itself
trees         finding and replacing the tensors inside what forward takes and returns
"""
