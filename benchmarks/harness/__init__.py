"""The standard benchmarks: ours, what the machine allows, and peers, each in its own process, one after another."""
