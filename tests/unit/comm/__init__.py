"""Tests of fsdp2/comm."""
