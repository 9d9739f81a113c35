"""`gguf-tools cook`: importances, quantized files, their divergence, report, card and checksums, in one run.

Nothing is computed here: the steps are the commands that there are, in order, with what each needs from the
ones before it.
"""
