"""The HTML page of one or several runs: `html` writes elements, one module for each command says what stands there.

Everything on the page comes from the run's own files (run.json, env.json, metrics.jsonl); nothing is measured here.
"""
