"""What doctor reads of a machine, on made-up /proc and /sys trees."""

import os

import pytest

from octavo.cli import machine


def tree(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


ALLOWED = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "50000 100000", "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, 0.5),
        ({"proc/self/cgroup": "0::/gone\n", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2.0),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/x\n1:name=systemd:/x\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "rubbish"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "1 0"}, None),
    ],
)
def test_cores(tmp_path, files, quota):
    found = machine.cores(tree(tmp_path, files))
    assert found["cgroup_quota"] == quota and found["affinity"] == ALLOWED
    assert found["usable"] == (ALLOWED if quota is None else max(1, min(ALLOWED, int(quota))))


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, None),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "1000\n", "sys/fs/cgroup/memory.max": "900\n"}, 900),
        ({"proc/self/cgroup": "9:memory:/a\n", "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "4096\n"}, 4096),
        ({"proc/self/cgroup": "9:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
    ],
)
def test_memory(tmp_path, files, limit):
    files = {"proc/meminfo": "MemTotal:  2048 kB\nMemAvailable: 1024 kB\nHugePages_Total: 0\nbroken\n", **files}
    assert machine.memory(tree(tmp_path, files)) == {"total": 2048 * 1024, "available": 1024 * 1024, "cgroup_limit": limit}


def test_memory_unknown(tmp_path):
    assert machine.memory(tmp_path) == {"total": None, "available": None, "cgroup_limit": None}


def test_cpu(tmp_path):
    files = {"proc/cpuinfo": "processor : 0\nmodel name : Some CPU\nflags : fpu avx2 amx_int8 avx512_vnni\nprocessor : 1\nflags : fpu\n"}
    found = machine.cpu(tree(tmp_path, files))
    assert found["model"] == "Some CPU" and found["features"] == ["avx2", "avx512_vnni", "amx_int8"]
    assert machine.cpu(tmp_path / "nothing")["features"] == []
    arm = machine.cpu(tree(tmp_path / "arm", {"proc/cpuinfo": "processor : 0\nFeatures : fp asimd asimddp bf16\n"}))
    assert arm["features"] == ["asimd", "asimddp", "bf16"]
