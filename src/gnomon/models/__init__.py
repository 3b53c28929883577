"""The model code that engines and learner share. This room imports neither."""
