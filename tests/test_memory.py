"""The memory that a process may use, with the limits of the control groups that it is in."""

import os
from pathlib import Path

from framework.runtime.memory import available_memory, machine_memory

MIB = 2**20
PHYSICAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def machine(root: Path, *, groups: str, files: dict[str, tuple[str, int, int]]) -> Path:
    """Write what the kernel shows of 8 GiB: each group's limit, bytes in use, and bytes of these in the file cache."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    (root / "proc/meminfo").write_text(f"MemTotal: 9000000 kB\nMemAvailable: {8 * 2**20} kB\n")
    for folder, (limit, used, cache) in files.items():
        group = root / "sys/fs/cgroup" / folder
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")
    return root


def test_the_smallest_limit_above_the_process_counts(tmp_path: Path) -> None:
    files = {"job/step": ("max", 10 * MIB, 0), "job": (str(100 * MIB), 40 * MIB, 15 * MIB)}
    root = machine(tmp_path, groups="3:cpu:/job\n0::/job/step\n", files=files)
    assert machine_memory(root) == 100 * MIB
    assert available_memory(root) == (100 - 40 + 15) * MIB


def test_a_container_that_sees_only_its_own_group_has_its_limit(tmp_path: Path) -> None:
    root = machine(tmp_path, groups="0::/docker/0123\n", files={"": (str(64 * MIB), 60 * MIB, 0)})
    assert (machine_memory(root), available_memory(root)) == (64 * MIB, 4 * MIB)


def test_without_groups_it_is_the_machines(tmp_path: Path) -> None:
    root = machine(tmp_path, groups="", files={})
    assert (machine_memory(root), available_memory(root)) == (PHYSICAL, 8 * 2**30)
    (root / "proc/self/cgroup").unlink()
    assert machine_memory(root) == PHYSICAL
