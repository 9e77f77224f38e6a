"""Events of a run -> what the notebook shows. Runs in the kernel, in the cell's thread.

view.py     one run's view: events in, screens out; notebook, console, terminal
head.py     events folded into what the head knows, and that as text and HTML
log.py      lines of all ranks -> the log under the cell
failure.py  failures -> the one exception
"""
