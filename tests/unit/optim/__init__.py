"""Tests of fsdp2/optim."""
