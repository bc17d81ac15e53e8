"""What a training run tells about itself: see README.md."""
