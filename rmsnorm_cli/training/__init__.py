"""The training protocol: two paths that differ in the norm alone, held against a reference perturbed by one rounding.

Read in this order: plan (which phases), loop (one phase, one step), twin (the yardstick), compare (gradients at one
point), verdict (loss curves), protocol (all phases, saved and resumed), ranks (data-parallel), stop (signals).
"""
