"""Fused forward passes, decoders and kernels for CPUs."""
