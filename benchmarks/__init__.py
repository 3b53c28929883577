"""Benchmarks of this repository, with the peers: see README.md."""
