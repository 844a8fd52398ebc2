"""What a training step needs, found without a GPU: pretended streams with clocks, and the memory that is alive.

Nothing of it is imported by ``import fsdp2``.
"""
