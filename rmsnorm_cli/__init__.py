"""Verify a fused GPU RMSNorm before accelerating a network with it."""

__version__ = "0.1.0"
