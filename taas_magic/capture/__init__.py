"""Find the notebook objects that a cell needs, send them to the ranks, and receive results.

work.py               the two kinds of work: a cell, and the call of a function
syntax.py             parse Python source in several threads safely
names.py              find the names and modules that a cell uses, without running it
modules.py            send the project's own modules as source; list the needed installed modules
pickling.py           convert values to bytes and shared memory, and back
reducers.py           reduce objects that pickle handles badly, torch's storages, and paths
culprit.py            find the path to an object that cannot be pickled
plain.py              convert plain data to bytes that can be read without running code
changes.py            find the captured values that a cell changed in rank 0
session_variables.py  choose the variables to send to the ranks of a session
digest.py             digests that tell whether two simple values are equal
home.py               pickle results in a rank and load them in the notebook
process_state.py      copy process settings: warning filters, loggers, torch's settings, ...
payload.py            capture the work and everything that the work needs; write and read a payload
"""
