"""How much memory is free."""

from pathlib import Path

from gnomon.records.memory import free_memory_bytes


def group(folder: Path, limit: str) -> Path:
    """Return a control group that uses 600 bytes, 100 of them file pages that nobody needs."""
    folder.mkdir()
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text("600\n")
    (folder / "memory.stat").write_text("anon 400\ninactive_file 100\n")
    return folder


def test_the_smaller_of_machine_and_container_counts(tmp_path: Path):
    """2 KiB are free in the machine; a limit of 1,000 bytes leaves 500, one of a million bytes all of the 2 KiB."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:   2 kB\n")

    assert free_memory_bytes(meminfo, group(tmp_path / "small", "1000")) == 500
    assert free_memory_bytes(meminfo, group(tmp_path / "large", "1000000")) == 2048
    assert free_memory_bytes(meminfo, group(tmp_path / "none", "max")) == 2048
    assert free_memory_bytes(meminfo, tmp_path / "nowhere") == 2048


def test_where_nothing_is_known_nothing_is_said(tmp_path: Path):
    """Neither file is there, as on another system."""
    assert free_memory_bytes(tmp_path / "meminfo", tmp_path / "group") is None
