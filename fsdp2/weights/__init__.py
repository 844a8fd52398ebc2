"""Weights into and out of sharded models: from rank 0, from safetensors files, and between ranks."""
