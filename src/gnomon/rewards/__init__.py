"""HOW AN ANSWER IS JUDGED: pure verifiers, and the worker processes they run in."""
