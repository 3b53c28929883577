"""Where rows come from."""

from pathlib import Path

import pytest

from gnomon.errors import DatasetError
from gnomon.tasks.sources import read_rows


def test_a_file_of_an_unknown_format_is_not_looked_for_on_the_hub(tmp_path: Path):
    """A file that is here and cannot be read is refused at once, with the formats that can."""
    table = tmp_path / "rows.csv"
    table.write_text("prompt,answer\n1+1=,2\n")

    with pytest.raises(DatasetError, match=r"no known format; known are \.json, \.jsonl, \.parquet"):
        read_rows(str(table), None, "train")
