from backwards_env.taskset import BackwardsTaskset

__all__ = ["BackwardsTaskset"]
