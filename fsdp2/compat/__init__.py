"""torch's and FSDP1's faces."""
