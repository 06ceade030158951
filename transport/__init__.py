"""Records that cross process boundaries, and the channels that carry them."""
