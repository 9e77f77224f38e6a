"""Turn the events of a run into the output of the notebook, in the cell's thread.

view.py     the view of one run, and the screens: notebook, console, terminal
head.py     the run's state, computed from its events, and the status header as text and HTML
log.py      the log under the cell, from the lines of all ranks
tails.py    the last lines of each rank, from the log files
failure.py  the exception, from the failures of a run
variables.py  the table of a session's variables
replay.py   the state and the past output of a run, from its journal
"""
