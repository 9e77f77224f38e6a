"""The notebook's side of taas-magic. This code runs in the kernel.

magic.py      the magics `%%taas` and `%taas`, and Tab completion
flags.py      parser of the flags after `%%taas`
launch.py     runs a cell on ranks from start to end (`--dry-run`: only describes it)
rehearsal.py  rehearses a cell on this machine (`--rehearse`)
functions.py  runs a function (`taas.run`) or a script on ranks
options.py    refuses options whose names are also parameters of the user's function
run.py        follows a run, handles the user's interrupts, and starts its fetchers
keyboard.py   lines that the user types for the ranks of a run
runs.py       finds runs and reads their folders (`taas.runs()`)
attach.py     shows the view of a run again
heads.py      updates the status headers of runs whose views were closed
sessions.py   the sessions of this kernel
pools.py      the pools of this kernel
vscode.py     attaches VS Code to a rank (`%taas debug --debugpy`)
logs.py       reads the log files of ranks
report.py     writes the file of `%taas report`
own_values.py tells the user that ranks have newer values of variables than the notebook
replaced_values.py  names the objects that still use a value that `--out` has replaced
between_cells.py  functions to call before each cell, and names for a hint after each cell
"""
