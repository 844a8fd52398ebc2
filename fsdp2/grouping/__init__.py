"""Make units and groups of modules. From the top down; a file imports only files below it.

plan           lists the units that a policy would make
policy         chooses the modules that become units, by policies of any form
blocks         finds the repeated blocks of a model
walk           tests for modules that can be units
copying        copies of sharded modules
grouping       makes groups of parameters, now and when parameters are added later
shared_memory  parameters that were several in the same memory
ties           parameters that several calls share
placing        chooses the mesh and the dimension for each parameter
collect        collects the parameters of a call and the modules that show them
modules        functions over all units below a module, by FSDP1's names
padding        reports the padding of shards
offloading     chooses the parameters that stay on the CPU
"""
