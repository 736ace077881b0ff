"""What this machine offers: processor, cores and memory that the process may use. For `octavo doctor`.

Stateless; reads /proc and /sys, and says None where they do not tell. The roots are parameters, so that tests can make them up.
Not here: judging what is enough (doctor.py); the native kernels count their own threads (native/src/machine.cpp).
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

#: Flags of /proc/cpuinfo the kernels care about (x86), or report (ARM).
CPU_FEATURES = (
    "sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16",
    "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip


def _read(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return None


def cpu(root: Path = Path("/")) -> dict[str, Any]:
    """Model name and the features that matter, as the first core reports them."""
    found: dict[str, str] = {}
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip().lower(), value.strip())
    flags = set((found.get("flags") or found.get("features") or "").split())
    return {
        "model": found.get("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "features": [feature for feature in CPU_FEATURES if feature in flags],
    }


def _cgroup_folders(root: Path) -> list[Path]:
    """This process's cgroup and those above it; a container often sees its own group as the root."""
    folders: list[Path] = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        base = root / "sys/fs/cgroup" / ("" if number == "0" else controllers)
        if number != "0" and not {"cpu", "memory"} & set(controllers.split(",")):
            continue
        own = base / path.lstrip("/")
        folders += [own, *(parent for parent in own.parents if parent == base or base in parent.parents), base]
    return list(dict.fromkeys(folders))


def _number(text: str | None) -> int | None:
    try:
        return int(text or "")
    except ValueError:
        return None


def cores(root: Path = Path("/")) -> dict[str, Any]:
    """Cores of the machine, those the affinity allows, and the cgroup's quota in cores (None: no limit)."""
    quotas: list[float] = []
    for folder in _cgroup_folders(root):
        v2 = (_read(folder / "cpu.max") or "").split()
        if len(v2) == 2 and v2[0] != "max" and _number(v2[0]) and _number(v2[1]):
            quotas.append(int(v2[0]) / int(v2[1]))
        quota, period = _number(_read(folder / "cpu.cfs_quota_us")), _number(_read(folder / "cpu.cfs_period_us"))
        if quota and period and quota > 0:
            quotas.append(quota / period)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota_cores = min(quotas, default=None)
    usable = allowed if quota_cores is None else max(1, min(allowed, int(quota_cores)))
    return {"online": os.cpu_count() or 1, "affinity": allowed, "cgroup_quota": quota_cores, "usable": usable}


def memory(root: Path = Path("/")) -> dict[str, Any]:
    """Bytes: of the machine, available now, and the cgroup's limit (None: no limit)."""
    sizes: dict[str, int] = {}
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        key, _, value = line.partition(":")
        number = _number(value.split()[0] if value.split() else None)
        if number is not None:
            sizes[key] = number * 1024
    limits = []
    for folder in _cgroup_folders(root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _number((_read(folder / name) or "").strip())
            if limit and limit < 1 << 60:  # version 1 writes "no limit" as a huge number
                limits.append(limit)
    return {"total": sizes.get("MemTotal"), "available": sizes.get("MemAvailable"), "cgroup_limit": min(limits, default=None)}
