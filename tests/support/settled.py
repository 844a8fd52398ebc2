"""Imported last by the fork server: what it holds by then stays as long as any process that it starts.

So none of them looks through it for garbage, which takes half a second, and writes to the memory that all share.
"""

import gc

gc.collect()
gc.freeze()
