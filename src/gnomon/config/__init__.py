"""What a person writes: experiments, their sections and the recipes that come with the package."""
