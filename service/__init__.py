"""The training service: a stock `tinker` client's loop, on the trainer's modules."""
