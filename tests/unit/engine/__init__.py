"""Tests of fsdp2/engine."""
