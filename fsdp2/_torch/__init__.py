"""Every private torch symbol fsdp2 leans on, by subject, each with the reason.

Nothing else in the package may name one, so that a torch that moves one fails here, loudly;
``tests/unit/test_torch*.py`` probe them one by one.
"""
