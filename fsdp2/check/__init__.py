"""``python -m fsdp2 check``: does fsdp2 work on these machines, are its results right, and what does a step cost there.

Nothing of it is imported by ``import fsdp2``. From the top down; a file imports only what stands below it.

command      what the command line takes
supervisor   the process that starts a rank's worker, watches it, and replaces it where it hangs or dies
worker       the process that runs the tasks of a rank
tasks        the table of everything that is run, in order
forecasted   a forecast of the measured step, with constants fitted to this machine
measure      memory, time and host work of a model of a real size, beside torch's own
cases        the table of small models whose training must be right
strict       small models again, with freed memory overwritten, and under torch's stream sanitizer
trial        three training steps with fsdp2, with torch's own and in one process, compared
models       the models
environment  machines, devices, versions, and problems that are known of them
stacks       which rank hangs, from the stacks of all of them
report       the verdicts as a table, as Markdown and as JSON
place        a rank of the job: its device, its options, and the words for verdicts
"""
