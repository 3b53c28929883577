"""FROM A TASK TO A GRADED GROUP, and from groups to a batch."""
