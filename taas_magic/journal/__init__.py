"""Write, read and analyse the journal, the file with all events of a run.

folder.py    the run folder, which holds the journal and the run's other files; writes the journal
reader.py    reads a journal from any process
analysis.py  how long ranks waited for batches, and why: sums, advice, plots
metrics.py   the numbers that ranks log by `taas.log`: curves, tables, plots
timeline.py  the times of each rank in the steps that `--profile` recorded, and one trace of all
             ranks
"""
