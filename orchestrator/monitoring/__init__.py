"""Monitoring: metrics, the timeline, traces and the summary of a run."""
