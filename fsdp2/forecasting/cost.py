"""The documented names of ``fsdp2.tools.forecast.cost``."""

from fsdp2.tools.forecast.cost import H100, Hardware, Link

__all__ = ["H100", "Hardware", "Link"]
