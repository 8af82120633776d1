"""What a run tells of itself."""
