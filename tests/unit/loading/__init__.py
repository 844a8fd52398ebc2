"""Tests of fsdp2/loading."""
