"""What `rmsnorm exercise` does with the catalogue of `faults`.

`lesson` is the default: predict what dividing by the padded block does, then run it. `page` shows one mistake, `matrix`
runs all of them against every gate and `gates_page` writes what each gate catches. `judge` compares one run with the
oracle and with the prediction, and `summary` keeps for `report` what was shown of one mistake.
"""
