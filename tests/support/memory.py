"""The memory that another process takes."""

from __future__ import annotations

from pathlib import Path


def high_water(pid: int) -> int:
    """Return the largest resident memory that a process has had so far, 0 once it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)
