"""Programs that stand on the library. Nothing of the library needs them. From the top down.

check     python -m fsdp2 check: does it work on these machines, are results right, what does a step cost
forecast  the memory, collectives and time of a step without a GPU, and records of real steps
"""
