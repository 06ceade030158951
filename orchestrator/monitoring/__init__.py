"""What a run tells about itself: metrics, timeline, traces, the summary."""
