"""What a person types in a notebook, and a run as the kernel holds it.

magic.py      `%%taas` and `%taas`; flags.py: the words of the head; completion.py: Tab
launch.py     captures the cell, plans, writes the run folder, asks the pool; dry_run.py: only says
run.py        follows the run, interrupts and concludes it; fetching.py: its fetchers
commands.py   status, logs, stacks, stop, pools, warm, down; check.py: `%taas pools --check`
pools.py      the pools of this kernel; interrupts.py: the user's interrupts, counted
"""
