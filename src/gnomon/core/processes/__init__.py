"""Programs that fork workers, and the workers: started, asked, timed and ended."""
