"""Train several algorithms with several seeds, and compare their scores."""
