"""What may be concluded: batches taken apart, and every algorithm checked against formulas written a second time."""
