"""Files copied out of a run, with a word on how far it is: a model has gigabytes."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from gnomon.progress import working
from gnomon.records.plain import open_plain

_BLOCK_BYTES = 1 << 22


def copy_files(files: Sequence[Path], folder: Path) -> None:
    """Copy ``files`` into ``folder``, with their times and rights.

    Raises: OSError, among them that of a full disk; what was copied by then stays.
    """
    with working(f"copying to {folder}", sum(file.stat().st_size for file in files), "bytes") as steps:
        for file in files:
            with open_plain(file) as source, open(folder / file.name, "xb") as target:
                while block := source.read(_BLOCK_BYTES):
                    target.write(block)
                    steps.advance(len(block))
            shutil.copystat(file, folder / file.name)
