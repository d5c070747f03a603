"""The memory that a process may use, with the limits of the control groups that it is in."""

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from framework.runtime.memory import available_memory, machine_memory

MIB = 2**20
PHYSICAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
V2 = {"limit": "memory.max", "used": "memory.current", "cache": "inactive_file", "none": "max"}
V1 = {
    "limit": "memory.limit_in_bytes",
    "used": "memory.usage_in_bytes",
    "cache": "total_inactive_file",
    "none": str(2**63 - 4096),
}


def machine(root: Path, *, groups: str, files: dict[str, tuple[str, int, int]], names: dict[str, str]) -> Path:
    """Write what the kernel shows of groups: each group's limit, bytes in use, and bytes of these in the file cache."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for folder, (limit, used, cache) in files.items():
        group = root / "sys/fs/cgroup" / folder
        group.mkdir(parents=True, exist_ok=True)
        (group / names["limit"]).write_text(f"{limit}\n")
        (group / names["used"]).write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 5\n{names['cache']} {cache}\n")
    return root


@pytest.mark.parametrize("names", [V2, V1], ids=["v2", "v1"])
def test_the_smallest_limit_above_the_process_counts(names: dict[str, str], tmp_path: Path) -> None:
    kinds, top = ("", "") if names is V2 else ("memory", "memory/")
    files = {f"{top}job/step": (names["none"], 10 * MIB, 0), f"{top}job": (str(100 * MIB), 40 * MIB, 15 * MIB)}
    root = machine(tmp_path, groups=f"3:cpu:/job\n0:{kinds}:/job/step\n", files=files, names=names)
    assert machine_memory(root) == 100 * MIB
    assert available_memory(root) == (100 - 40 + 15) * MIB


def test_a_container_that_sees_only_its_own_group_has_its_limit(tmp_path: Path) -> None:
    root = machine(tmp_path, groups="0::/docker/0123\n", files={"": (str(64 * MIB), 60 * MIB, 0)}, names=V2)
    assert (machine_memory(root), available_memory(root)) == (64 * MIB, 4 * MIB)


def test_without_groups_it_is_the_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * 2**30))
    root = machine(tmp_path, groups="", files={}, names=V2)
    assert (machine_memory(root), available_memory(root)) == (PHYSICAL, 8 * 2**30)
    (root / "proc/self/cgroup").unlink()
    assert machine_memory(root) == PHYSICAL
