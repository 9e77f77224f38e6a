"""Hosts that may have nothing of ours: what is there, what is missing, how it gets there.

facts.py         asks a host, by ../probe.py, through a `Shell`; what this kernel is like
requirements.py  which packages a host needs and lacks; pure
install.py       brings what is missing; landing.py runs on the host and puts it into its cache
checks.py        facts against what a run needs -> findings, each with what to do
"""
