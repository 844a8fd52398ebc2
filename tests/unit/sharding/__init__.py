"""Tests of fsdp2/sharding."""
