"""What every room stands on: types, metrics, errors, tables, files, statistics and processes."""
