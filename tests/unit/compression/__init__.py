"""Tests of fsdp2/compression."""
