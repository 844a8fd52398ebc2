"""What only a migration to fsdp2 needs. From the top down; a file imports only files below it.

install     libraries that import torch's fully_shard get ours
names       torch's names for the parts of a unit, a group, a parameter and a mesh
state_dict  FSDP1's full, sharded and local state dicts of models and optimizers
methods     methods of FSDP1's wrapper, and errors that name the replacement of an argument
arguments   merges the arguments of a call with those of a policy, FSDP1's included
strategy    translates FSDP1's sharding strategies to meshes
"""
