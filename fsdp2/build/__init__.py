"""From modules to units and groups: from the top down; a file imports only what stands below it.

plan       which modules would become units, and what each would hold
policy     which modules become units, in the words of FullyShardedDataParallel
blocks     the repeated blocks of a model
walk       what may be a unit, and what is looked at to find units
strategy   how parameters are spread, in the words of FullyShardedDataParallel
arguments  what a policy gives a unit of its own
copying    deep copies of sharded modules
grouping   from parameters to groups, now and when some are added later
placing    how each parameter is cut, and over which mesh
ties       parameters that other calls manage already
collect    the parameters of a call, and where modules show them
modules    functions over all units below a module, by FSDP1's names
padding    what equal pieces cost
offloading  which parameters live on the CPU
"""
