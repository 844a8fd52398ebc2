"""``python -m fsdp2 check`` tests fsdp2 on your machines: correct results, and the cost of a step.

``import fsdp2`` does not import this folder. From the top down; a file imports only files below it.

command      the command line
supervisor   the process that starts a rank's worker, watches it, and replaces it if it hangs or dies
worker       the process that runs the tasks of a rank
tasks        the table of all tasks, in order
forecasted   a forecast of the measured step, with constants fitted to this machine
measure      memory, time and host work of a model of a real size, beside torch's own
cases        the table of small models whose training must be right
strict       small models again, with freed memory overwritten
on_streams   small models again, with streams watched
trial        compares three training steps with fsdp2, with torch's own and in one process
models       the models
ordering     watches which kernels use memory that another stream still uses
accesses     who used which bytes, and behind what
environment  machines, devices, versions, and their known problems
stacks       finds the rank that hangs, from the stacks of all ranks
report       the verdicts as a table, as Markdown and as JSON
place        a rank of the job: its device, its options, and the names of verdicts
"""
