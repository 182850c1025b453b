"""The training protocol: two paths that differ in the norm alone, held against a reference perturbed by one rounding.

Read in this order: plan (which phases), lineage (what a checkpoint is of), loop (one phase, one step), twin (the
yardstick), compare (gradients at one point), verdict (loss curves), protocol (all phases, saved and resumed), place and
ranks (data-parallel), stop (signals).
"""
