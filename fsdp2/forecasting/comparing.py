"""The documented names of ``fsdp2.tools.forecast.comparing``."""

from fsdp2.tools.forecast.comparing import compare, comparison

__all__ = ["compare", "comparison"]
