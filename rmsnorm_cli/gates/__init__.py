"""The gates, in the order in which they are asked; each has its own verdict and the worst is the whole's."""
