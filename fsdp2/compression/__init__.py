"""Parameters and gradients in fewer bytes: formats that a custom gather and a custom reduction send. From the top down.

collectives  the custom gather and reduction that a policy asks for
policy       which tensors to compress, and how
formats      numbers in blocks of few bits, with a scale for each block
"""
