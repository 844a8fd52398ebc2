"""Tests of fsdp2/runtime."""
