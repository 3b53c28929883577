"""WHAT IS WRITTEN DOWN: run directories, metrics, rollouts, checkpoints."""
