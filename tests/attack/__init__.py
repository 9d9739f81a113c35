"""An attack on all commands: kills, failing calls of the system, inputs that change, links, liars.

scripts/attack.py runs it for a person. `commands` lists what is attacked and `material` makes its inputs,
`children` runs a command in a forked process and disturbs it, `trials` judges how that ended, and the other
modules are the kinds of disturbance.
"""
