"""What scripts/compare_builds.py runs, and how it looks at what comes of it.

`cases`, `gguf_cases` and `mistakes` list the command lines, `material` makes their inputs, `outcomes` runs
chains of them and notes what they did, and `normal` says where two runs of one build differ by nature.
"""
