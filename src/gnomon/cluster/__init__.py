"""Many processes, on one machine or many, behind the same protocols; the only room that knows ray."""
