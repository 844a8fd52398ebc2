"""Load, save and show whole values of sharded parameters. From the top down; a file imports only files below it.

updates/         sends weights to inference engines, bucket by bucket, or what changed of them
load_state_dict  converts values to shards in load_state_dict()
load             loads values from files, or from the first rank
save             writes safetensors files block by block
sync             copies the first rank's values to the other ranks
summon           shows full parameters for the length of a with block
export           yields every full parameter, one after the other
handed           tensors that callers hand in, whose memory loading would free
local_pieces     this rank's part of a tensor, and joining the parts of all ranks
matching         assigns values to parameters and reports every mismatch
materialize      allocates memory for tensors on the meta device
offers           the union of what ranks hold, and whether a name stands for one tensor on all of them
whole            gathers outside a training step
transfer         sends blocks from the ranks that hold them to the ranks that need them, in bounded memory
select           the tensors of a module: names, groups, boxes, and the ranks that they are spread over
safetensors      the file format
buckets          blocks of tensors, packed into buckets of bounded size
temporary        a folder for incomplete files
ranks            ranks that act together: share values, and raise an error on all when one fails
progress         reports the progress of a load or save
names            names of the plain model
"""
