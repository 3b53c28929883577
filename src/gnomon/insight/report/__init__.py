"""A run, or several beside each other, on one page that asks nobody for anything."""
