"""What a person types in a notebook, and a run as the kernel holds it.

magic.py      `%%taas`; `%taas` status, logs, stacks, stop, pools, warm, down; what Tab offers
flags.py      the words of the head
launch.py     captures the cell, plans, writes the run folder, asks the pool; `--dry-run` only says
run.py        follows the run, interrupts and concludes it; its fetchers
pools.py      the pools of this kernel
"""
