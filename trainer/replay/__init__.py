"""A step that is not finite: what is kept of it, and its replay, which says where it comes from."""
