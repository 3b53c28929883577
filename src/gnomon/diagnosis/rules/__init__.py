"""The rules, grouped by the metrics that they read; `catalog` lists them."""
