"""What a changed field of config.json does: to transformers' logits, to ours, and to what is said of it.

models.py     a small model of each family, its weights a function of their names
mutations.py  values to try for each field that the family's class in transformers knows
meanings.py   words that tell of a field without its name
judge.py      the outcome of one mutation
"""
