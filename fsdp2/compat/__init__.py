"""torch's and FSDP1's faces. From the top down; a file imports only what stands below it.

install  libraries that import torch's fully_shard get ours
names    what torch calls the parts of a unit, a group and a parameter
"""
