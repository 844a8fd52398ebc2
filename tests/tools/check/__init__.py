"""The command that checks whether fsdp2 works on somebody's machines."""
