"""Prepare hosts on which taas-magic may not be installed.

facts.py     asks hosts for their facts (with ../probe.py); judges whether hosts can execute runs
install.py   finds the packages that a host lacks, and installs them into the user's cache there
"""
