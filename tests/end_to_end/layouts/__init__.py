"""The ways in which programs save a model, and whether each becomes what the published one becomes.

ways.py   saves a small model in each of them
judge.py  the outcome of one
"""
