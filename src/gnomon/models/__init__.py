"""The network, shared by engines and learner, knowing neither."""
