"""The documented imports of the forecast, which ``fsdp2.tools.forecast`` implements."""
