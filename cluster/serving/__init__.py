"""What Ray Serve is told: the front, scaling, and who listens."""
