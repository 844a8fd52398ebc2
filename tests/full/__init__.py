"""Full parameters of the whole model: shown for a while, exported, documented."""
