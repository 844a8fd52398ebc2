"""The private torch symbols that fsdp2 uses, by subject, each with the reason.

No other folder of the package may use one, so that a torch version that moves one fails here.
``tests/unit/test_torch*.py`` test each of them.
"""
