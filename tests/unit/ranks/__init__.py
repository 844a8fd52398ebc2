"""Tests of fsdp2/ranks."""
