"""What a run tells about itself: metrics of each step, the reward curve, the summary."""
