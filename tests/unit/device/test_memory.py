"""Free memory stops at the container's limit, whatever the machine has."""

import gc
import mmap

import psutil
import pytest
import torch

from worker_svc.device.memory import free_bytes, free_host_bytes, own_bytes

MIB = 1 << 20


def group(folder, *, names, limit, used, cache):
    folder.mkdir(parents=True, exist_ok=True)
    limit_name, used_name, cache_name = names
    (folder / limit_name).write_text(f"{limit}\n")
    (folder / used_name).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{cache_name} {cache}\n")


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def processes(root, text):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(text)


def test_version_2_counts_what_the_group_has_left_and_its_cache_as_free(tmp_path):
    processes(tmp_path, "0::/kube/pod\n")
    group(tmp_path / "sys/fs/cgroup/kube/pod", names=V2, limit=30 * MIB, used=20 * MIB, cache=2 * MIB)
    assert free_host_bytes(tmp_path) == 12 * MIB


def test_a_limit_of_a_group_around_it_holds_too(tmp_path):
    processes(tmp_path, "0::/kube/pod\n")
    group(tmp_path / "sys/fs/cgroup/kube/pod", names=V2, limit="max", used=20 * MIB, cache=0)
    group(tmp_path / "sys/fs/cgroup/kube", names=V2, limit=25 * MIB, used=20 * MIB, cache=MIB)
    assert free_host_bytes(tmp_path) == 6 * MIB


def test_inside_a_container_the_mount_is_the_group(tmp_path):
    processes(tmp_path, "0::/\n")
    group(tmp_path / "sys/fs/cgroup", names=V2, limit=9 * MIB, used=2 * MIB, cache=0)
    assert free_host_bytes(tmp_path) == 7 * MIB


@pytest.mark.parametrize("place", ["docker/abc", ""])
def test_version_1_by_its_path_or_the_mount(tmp_path, place):
    processes(tmp_path, "5:cpu:/x\n4:memory:/docker/abc\n0::/\n")
    group(tmp_path / "sys/fs/cgroup/memory" / place, names=V1, limit=8 * MIB, used=5 * MIB, cache=MIB)
    assert free_host_bytes(tmp_path) == 4 * MIB


def test_a_group_that_is_over_its_limit_has_nothing_left(tmp_path):
    processes(tmp_path, "0::/\n")
    group(tmp_path / "sys/fs/cgroup", names=V2, limit=9 * MIB, used=12 * MIB, cache=0)
    assert free_host_bytes(tmp_path) == 0


@pytest.mark.parametrize("text", ["", "0::/\n", "4:memory:/a\n", "nonsense\n"])
def test_without_limits_it_is_the_machines(tmp_path, text):
    processes(tmp_path, text)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("garbage")
    assert free_host_bytes(tmp_path) == pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_what_nobody_refers_to_is_given_back_before_reading():
    class Cycle:
        pass

    freed = []
    cycle = Cycle()
    cycle.itself = cycle
    gc.callbacks.append(note := lambda phase, info: freed.append(phase))
    try:
        del cycle
        assert 0 < free_bytes(torch.device("cpu")) <= psutil.virtual_memory().total
    finally:
        gc.callbacks.remove(note)
    assert "stop" in freed


def test_what_is_ours_grows_by_what_we_write_and_not_by_files_that_we_map(tmp_path):
    file = tmp_path / "mapped"
    file.write_bytes(bytes(32 << 20))
    cpu = torch.device("cpu")
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        before = own_bytes(cpu)
        assert sum(mapped[:: mmap.PAGESIZE]) == 0
        after_mapping = own_bytes(cpu)
        # Not from the allocator, which may have as much left over from earlier tests.
        with mmap.mmap(-1, 64 << 20) as block:
            block.write(bytes(64 << 20))
            after_writing = own_bytes(cpu)
    assert after_mapping - before < 8 << 20
    assert after_writing - after_mapping > 60 << 20
