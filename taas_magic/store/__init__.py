"""The project store: rank 0 alone may write to it, and hosts that do not share it have a copy.

rule.py     which folder it is, whether it can be used, which run owns it
guard.py    holds a rank to the rule, by mounts.py, landlock.py, or Python alone
redirect/   ordinary Python writes of other ranks go to a scratch folder
receipt.py  what a run did to it
publish.py  files that appear whole or not at all
mirror/     the store on hosts that share no file system with the notebook
"""
