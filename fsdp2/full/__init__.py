"""The whole model's parameters in full: shown on the modules for a while, or one after the other."""
