"""Forecast the memory, collectives and time of a training step without a GPU, and record real steps.

``import fsdp2`` does not import this folder. From the top down; a file imports only files below it.

command    the command line
comparing  compares several settings of one program
run        runs a step on a simulated rank
result     the figures and tables of a forecast
libraries  runs one script with fsdp2's fully_shard, or with torch's own
others     simulates ranks that use units which the simulated rank skips
recording  records steps of a real run as timelines
saving     files that show timelines
page       timelines as an HTML page
pictures   timelines as pictures
rank       one rank of a simulated job, and errors for code that cannot run there
memory     the live storages and their purposes
clock      simulated streams whose kernels take time
timeline   a step: its spans, waits and memory over time
moving     what a collective moves
cost       the time of a kernel or a collective
"""
