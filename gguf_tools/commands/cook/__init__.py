"""`gguf-tools cook`: importances, quantized files, their divergence, report, card and checksums, in one run.

Nothing is computed here: the steps are what the commands do, in order, with what each needs from the ones
before it. They are one list of values (steps.py), from which the record, the dry run and the run derive.
"""
