"""What a cell needs from the notebook, and how it travels to the ranks and back.

names.py          which names and modules a cell uses; pure
modules.py        the project's own modules, as source; installed ones that are needed; `taas`
pickling.py       values as bytes and shared memory, and back
reducers.py       objects that pickle takes by name, or not at all; torch's storages; paths
culprit.py        the path to what cannot be pickled
process_state.py  what cells set in their process: warning filters, loggers, torch's settings, ...
payload.py        a cell with all of that: capture, write, read
"""
