"""Full, sharded and local state dicts. From the top down; a file imports only files below it.

optimizer  an optimizer's state, keyed by parameter names
settings   chooses the kind of state dict that a module returns
saving     converts the result of state_dict() for modules with a setting
convert    converts values to whole tensors, shards or pieces
"""
