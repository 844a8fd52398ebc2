"""Tests of fsdp2/optimizer."""
