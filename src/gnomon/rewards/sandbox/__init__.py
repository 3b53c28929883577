"""WHERE MODEL-WRITTEN CODE RUNS: a protocol, the isolators behind it, and the probes that test them at start."""
