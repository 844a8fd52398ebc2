"""Optimizer steps on local shards as plain tensors, which cost less on the host. From the top down.

local_step  what users call, and the steps
collecting  collects a group's tensors for a step, as torch's optimizer does
proxies     plain parameters that replace shards during steps of optimizers that are not torch's own
"""
