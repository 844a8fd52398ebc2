"""What a training step needs, found without a GPU: pretended streams with clocks, and the memory that is alive.

Nothing of it is imported by ``import fsdp2``. From the top down; a file imports only what stands below it.

command    what the command line takes
comparing  several settings of one program side by side
run        a step, and what it needed
result     its figures and tables
libraries  one script with fsdp2's fully_shard, or with torch's own
others     ranks that use what the simulated one skips
recording  steps of a real run as timelines
saving     files that show timelines
page       timelines as an HTML page
pictures   timelines as pictures
rank       one rank of a job that is not there, and what code should do that cannot run there
memory     the storages that are alive, and what they are for
clock      streams whose kernels take time
timeline   what ran when, what waited, what was in memory
cost       how long a kernel or a collective takes
"""
