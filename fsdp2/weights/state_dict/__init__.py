"""State dicts: full, sharded and local. From the top down; a file imports only what stands below it.

optimizer        an optimizer's state by the names of parameters
settings         which kind a module makes
saving           what state_dict returns for modules with a setting
convert          what values become under a setting
loading          what load_state_dict puts into shards
pieces           this rank's part of a tensor, and how the parts of all ranks are joined
"""
