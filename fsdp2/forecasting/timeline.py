"""The documented names of ``fsdp2.tools.forecast.timeline``."""

from fsdp2.tools.forecast.timeline import Timeline

__all__ = ["Timeline"]
