"""Weights on their way from the learner to engines: files, remote references, rounding and fingerprints."""
