"""C for what torch does in many passes over memory: built at first use, done without where there is no compiler."""
