"""What a run says about itself: metrics, log, progress."""
