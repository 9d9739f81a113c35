"""Differences of operating systems: reading and writing at an offset, locks, limits of a process.

The rest of the toolkit asks here, so that it runs on Linux, macOS and Windows alike. A function that a system
lacks is looked for when it is called, never when a module is imported.
"""
