"""What a person types in a notebook, and a run as the kernel holds it.

magic.py      `%%taas` and `%taas`, and what Tab offers; flags.py: the words of the head
launch.py     captures the cell, plans, writes the run folder, asks the pool; `--dry-run` only says
run.py        follows the run, interrupts and concludes it; its fetchers
commands.py   status, logs, stacks, stop, pools, warm, down
pools.py      the pools of this kernel
"""
