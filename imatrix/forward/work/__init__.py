"""Folders in which long runs keep finished layers, and whose they are."""
