"""Learners, engines and graders as actors of a Ray cluster. Only this room imports ray."""
