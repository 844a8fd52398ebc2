"""HOW bytes move: tensors in, tensors out. From the top down; a file imports only what stands below it.

context      what groups communicate on: the lanes, the chunks in flight
gather       from shards to full parameters
reduce       from full gradients to shards of their mean
reductions   a window of reductions in flight
staging      memory of the host that passes through a device
retained     memory that reductions on streams still read
late_checks  checks that a device makes, and the host reads when they have arrived
scaling      how a sum of gradients becomes their mean
collectives  the only place that calls a collective
streams      lanes (streams), and every wait between them
host_work    collectives that the host waits for, in slices of a second
comparison   whether two tensors of a device have the same values in a few places
sample       a few bytes of tensors on the host, by which a write shows
pieces       copies between full tensors and the pieces of ranks
"""
