"""CUDA's and NCCL's own code, run on a device that computes nothing: see README.md."""
