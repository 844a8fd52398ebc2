"""Which modules become units and how each is spread, in the words of FullyShardedDataParallel."""
