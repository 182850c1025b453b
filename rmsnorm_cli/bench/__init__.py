"""What `bench` times and how its numbers become rows: the room behind commands/bench.py.

Reading order: workload (a cell and its buffers), programs (an implementation on them, checked at every sample),
measure (sessions of a cell), rows (from samples to verdicts), tables (what people read), earlier (--compare).
"""
