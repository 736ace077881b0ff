"""Resident memory of a server's processes by role, from /proc.

Stateless. Not here: when it is sampled (load.py).
"""

from __future__ import annotations

from pathlib import Path

ROLES = {"octavo.core_process": "core", "octavo.server.input_process": "input"}


def resident_mib(root: int) -> dict[str, float]:
    """MiB of the process `root` ("http") and of those below it by role; several of one role are added up."""
    sizes: dict[str, float] = {}
    for pid in (root, *descendants(root)):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace").split("\0")
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (OSError, IndexError):  # it has ended meanwhile
            continue
        role = next((role for module, role in ROLES.items() if module in command), "http" if pid == root else "other")
        sizes[role] = sizes.get(role, 0.0) + pages * 4096 / 2**20
    return {role: round(size, 2) for role, size in sizes.items()}


def descendants(root: int) -> list[int]:
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                # "pid (name) state ppid ...": the name may hold spaces and brackets
                parents[int(folder.name)] = int((folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue
    found, ring = [], [root]
    while ring:
        ring = [pid for pid, parent in parents.items() if parent in ring]
        found += ring
    return found
